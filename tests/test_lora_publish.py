"""Publication of a model with adapters: each way to publish something else than it amounts to is found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from batches import END, PAD, make_model
from peft.tuners.lora import LoraLayer
from test_lora import adapted, by_formula, move
from test_publish import EngineIgnores, ForgetsInSilence, LoadsIntoACopy, prompts
from torch import Tensor, nn

from torchrl_grpo.errors import TrainingStopped
from torchrl_grpo.inference.receipts import checksum
from torchrl_grpo.inference.transformers_engine import TransformersEngine
from torchrl_grpo.models import lora
from torchrl_grpo.models.logprobs import TokenScorer
from torchrl_grpo.training.publish import WeightPublisher, named_weights, perturbed

Weights = Iterable[tuple[str, Tensor]]


def make_publisher(
    family: str = "llama",
    moved: float = 0.0,
    dtype: torch.dtype = torch.float32,
    engine: type[TransformersEngine] = TransformersEngine,
    publisher: type[WeightPublisher] = WeightPublisher,
) -> WeightPublisher:
    """The engine is built from the base, as in a run; the trainer has its adapters."""
    model = adapted(family, moved=moved, dtype=dtype)
    own = engine(make_model(family).to(dtype), [END], PAD)
    return publisher(model, TokenScorer(model), own, prompts(), PAD, dtype)


@pytest.mark.parametrize("family", ["llama", "llama_tied", "gpt2", "qwen3"])
@pytest.mark.parametrize("size", [1e-6, 1e-4, 1e-2])
def test_a_sound_publication_of_adapters_passes(family: str, size: float) -> None:
    publisher = make_publisher(family)
    publisher.prove_at_start(0)
    for step in range(1, 11):
        move(publisher.model, size, seed=step)
        assert publisher.publish(step)["publish/gap"] < 1e-3
    engine: Any = publisher.engine
    expected = by_formula(publisher.model)
    for name, p in engine.model.named_parameters():
        torch.testing.assert_close(p.double(), expected[name].double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [1e-4, 1e-2])
def test_a_sound_publication_over_a_base_in_bfloat16_passes(size: float) -> None:
    publisher = make_publisher(dtype=torch.bfloat16)
    publisher.start_bound = 3.0  # these weights round far more than a real model's
    publisher.prove_at_start(0)
    for step in range(1, 6):
        move(publisher.model, size, seed=step)
        publisher.publish(step)
    assert publisher.engine.policy_version == 5


@pytest.mark.parametrize("moved", [0.0, 0.1])
def test_the_start_test_puts_base_and_adapters_back_bit_for_bit(moved: float) -> None:
    publisher = make_publisher(moved=moved)
    before = {name: checksum(p.detach()) for name, p in publisher.model.named_parameters()}
    assert publisher.prove_at_start(3)["publish/gap"] < 1e-3
    assert {name: checksum(p.detach()) for name, p in publisher.model.named_parameters()} == before
    with pytest.raises(RuntimeError, match="in between"), perturbed(publisher.model):
        changed = {n for n, p in publisher.model.named_parameters() if checksum(p.detach()) != before[n]}
        raise RuntimeError("in between")
    assert changed == set(before)
    assert {name: checksum(p.detach()) for name, p in publisher.model.named_parameters()} == before


# Sabotage of the merge itself, which the live receipt shares: the answer must tell.

honest = lora.merged


def forgets_the_adapter(layer: LoraLayer) -> Tensor:
    return layer.get_base_layer().weight.detach().float().clone()


def scales_wrongly(layer: LoraLayer) -> Tensor:
    # alpha = 12 and rank = 4: the scale is 3.
    base = layer.get_base_layer().weight.detach()
    return base + (honest(layer) - base) / 3.0


def adds_twice(layer: LoraLayer) -> Tensor:
    return honest(layer) + layer.get_delta_weight("default")


def subtracts(layer: LoraLayer) -> Tensor:
    return honest(layer) - 2 * layer.get_delta_weight("default")


def leaves_one_layer_out(model: nn.Module) -> Callable[[LoraLayer], Tensor]:
    left_out = lora.adapted_layers(model)["model.layers.1.self_attn.v_proj"]
    return lambda layer: forgets_the_adapter(layer) if layer is left_out else honest(layer)


def keeps_the_first(model: nn.Module) -> Callable[[LoraLayer], Tensor]:
    """Merges each matrix once and hands out the same ever after."""
    memory: dict[int, Tensor] = {}
    return lambda layer: memory.setdefault(id(layer), honest(layer))


ALWAYS = {
    "no adapter": lambda model: forgets_the_adapter,
    "scale": lambda model: scales_wrongly,
    "twice": lambda model: adds_twice,
    "sign": lambda model: subtracts,
    "one layer": leaves_one_layer_out,
    "stale": keeps_the_first,
}


@pytest.mark.parametrize("moved", [0.0, 1e-3, 0.1])
@pytest.mark.parametrize("kind", ALWAYS)
def test_a_wrong_merge_is_found_before_training_even_where_the_adapter_is_still_zero(
    kind: str, moved: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = make_publisher(moved=moved)
    monkeypatch.setattr(lora, "merged", ALWAYS[kind](publisher.model))
    with pytest.raises(TrainingStopped):
        publisher.prove_at_start(0)


@pytest.mark.parametrize("kind", ALWAYS)
def test_a_merge_that_goes_wrong_later_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = make_publisher()
    publisher.prove_at_start(0)
    move(publisher.model, 0.02, seed=1)
    publisher.publish(1)
    monkeypatch.setattr(lora, "merged", ALWAYS[kind](publisher.model))
    with pytest.raises(TrainingStopped, match="TransformersEngine: after publishing version"):
        for step in range(2, 6):
            move(publisher.model, 0.02, seed=step)
            publisher.publish(step)


@pytest.mark.parametrize("kind", ["no adapter", "stale"])
def test_a_small_step_that_never_arrives_is_found_too(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = make_publisher()
    publisher.prove_at_start(0)
    monkeypatch.setattr(lora, "merged", ALWAYS[kind](publisher.model))
    with pytest.raises(TrainingStopped, match=r"nearer to earlier weights|differ from the trainer's"):
        for step in range(1, 40):
            move(publisher.model, 1e-5, seed=step)
            publisher.publish(step)


# Sabotage of what the engine is handed: the receipt must tell, however small the step.


class Hands(WeightPublisher):
    """Hands over other weights than the live ones once the proof at the start is over."""

    calls = 0

    def _load(self, weights: Weights, *rest: Any) -> Any:
        self.calls += 1
        if self.calls <= 3:
            self.first = [(name, tensor.clone()) for name, tensor in named_weights(self.model)]
            return super()._load(weights, *rest)
        return super()._load(self.wrong(list(weights)), *rest)

    def wrong(self, weights: list[tuple[str, Tensor]]) -> Weights:
        raise NotImplementedError


class HandsTheBase(Hands):
    def wrong(self, weights: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        with lora.adapters_off(self.model):
            for name, parameter in self.model.named_parameters():
                if not lora.is_adapter(name):
                    yield name.replace(".base_layer", ""), parameter.detach()


class HandsAStaleMerge(Hands):
    def wrong(self, weights: list[tuple[str, Tensor]]) -> Weights:
        return self.first


class HandsAnotherScale(Hands):
    def wrong(self, weights: list[tuple[str, Tensor]]) -> Weights:
        return list(by_formula(self.model, scale=1.5).items())


class HandsOneLayerWithout(Hands):
    def wrong(self, weights: list[tuple[str, Tensor]]) -> Weights:
        stale = dict(self.first)
        return [(name, stale[name] if "layers.0.mlp.up_proj" in name else tensor) for name, tensor in weights]


class HandsRawNames(Hands):
    def wrong(self, weights: list[tuple[str, Tensor]]) -> Weights:
        return [(name, tensor) for name, tensor in weights if "o_proj" not in name]


@pytest.mark.parametrize(
    "publisher,message",
    [
        (HandsTheBase, "14 tensors were stale"),
        (HandsAStaleMerge, "14 tensors were stale"),
        (HandsAnotherScale, "14 tensors were stale"),
        (HandsOneLayerWithout, "1 tensors were stale, the first is model.layers.0.mlp.up_proj.weight"),
        (HandsRawNames, "2 tensors were not published, the first is model.layers.0.self_attn.o_proj.weight"),
    ],
)
def test_other_weights_than_the_live_ones_are_found(publisher: type[Hands], message: str) -> None:
    sabotaged = make_publisher(publisher=publisher)
    sabotaged.prove_at_start(0)
    move(sabotaged.model, 1e-6)
    with pytest.raises(TrainingStopped, match=message):
        sabotaged.publish(1)


class EngineIgnoresLater(EngineIgnores):
    """Takes nothing once the proof at the start is over."""

    calls = -2


@pytest.mark.parametrize(
    "engine,size,message",
    [
        (EngineIgnoresLater, 3e-2, "differ from the trainer's by up to"),
        (EngineIgnoresLater, 1e-5, "nearer to earlier weights"),
        (LoadsIntoACopy, 1e-5, "do not all reach the model that answers"),
        (ForgetsInSilence, 3e-2, "differ from the trainer's by up to"),
    ],
)
def test_an_engine_that_takes_nothing_is_found(
    engine: type[TransformersEngine], size: float, message: str
) -> None:
    sabotaged = make_publisher(engine=engine)
    with pytest.raises(TrainingStopped, match=message):
        sabotaged.prove_at_start(0)
        for step in range(1, 40):
            move(sabotaged.model, size, seed=step)
            sabotaged.publish(step)
