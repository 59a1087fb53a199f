"""Publication of a model with adapters: each way to publish something else than it amounts to is found."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from adapters import adapted, by_formula, move
from batches import END, PAD, make_model
from faulty_engines import EngineIgnores, LoadsIntoACopy, prompts
from publishers import Direct
from stale_parts import (
    FORMATS,
    Fault,
    KeepsAPart,
    assert_all_are_found,
    assert_each_is_found,
    every_part,
    move_everything,
    of_each_kind,
)
from torch import Tensor, nn

from torchrl_grpo.errors import TrainingStopped
from torchrl_grpo.inference.checksums import checksum
from torchrl_grpo.inference.transformers_engine import TransformersEngine
from torchrl_grpo.models import lora
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.weight_sync import publisher as publish
from torchrl_grpo.weight_sync.probe import named_weights, perturbed
from torchrl_grpo.weight_sync.publisher import WeightPublisher

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

pytestmark = pytest.mark.slow

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
    return publisher(
        model,
        TokenScorer(model),
        engine=own,
        probe_prompts=prompts(),
        pad_token_id=PAD,
        precision=dtype,
        engine_dtype=dtype,
        transport=Direct(own),
    )


@pytest.mark.parametrize("family", ["llama", "llama_tied", "gpt2", "qwen3"])
@pytest.mark.parametrize("size", [1e-6, 1e-4, 1e-2])
def test_a_sound_publication_of_adapters_passes(family: str, size: float) -> None:
    publisher = make_publisher(family)
    publisher.verify_at_start(0)
    for step in range(1, 11):
        move(publisher.model, size, seed=step)
        assert publisher.publish(step)["publish/logprob_diff_max"] < 1e-3
    engine: Any = publisher.engine
    expected = by_formula(publisher.model)
    for name, p in engine.model.named_parameters():
        torch.testing.assert_close(p.double(), expected[name].double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [1e-4, 1e-2])
def test_a_sound_publication_over_a_base_in_bfloat16_passes(size: float) -> None:
    publisher = make_publisher(dtype=torch.bfloat16)
    publisher.verify_at_start(0)
    for step in range(1, 6):
        move(publisher.model, size, seed=step)
        publisher.publish(step)
    assert publisher.engine.policy_version == 5


@pytest.mark.parametrize("moved", [0.0, 0.1])
def test_the_start_test_puts_base_and_adapters_back_bit_for_bit(moved: float) -> None:
    publisher = make_publisher(moved=moved)
    before = {name: checksum(p.detach()) for name, p in publisher.model.named_parameters()}
    assert publisher.verify_at_start(3)["publish/logprob_diff_max"] < 1e-3
    assert {name: checksum(p.detach()) for name, p in publisher.model.named_parameters()} == before
    with pytest.raises(RuntimeError, match="in between"), perturbed(publisher.model):
        changed = {n for n, p in publisher.model.named_parameters() if checksum(p.detach()) != before[n]}
        raise RuntimeError("in between")
    assert changed == set(before)
    assert {name: checksum(p.detach()) for name, p in publisher.model.named_parameters()} == before


# Sabotage of the merge itself: the layer, computed the other way, must tell.

honest = lora.merged_weight


def forgets_the_adapter(layer: LoraLayer) -> Tensor:
    weight: Tensor = layer.get_base_layer().weight
    return weight.detach().float().clone()


def scales_wrongly(layer: LoraLayer) -> Tensor:
    # alpha = 12 and rank = 4: the scale is 3.
    base: Tensor = layer.get_base_layer().weight.detach()
    return base + (honest(layer) - base) / 3.0


def adds_twice(layer: LoraLayer) -> Tensor:
    delta: Tensor = layer.get_delta_weight("default")
    return honest(layer) + delta


def subtracts(layer: LoraLayer) -> Tensor:
    delta: Tensor = layer.get_delta_weight("default")
    return honest(layer) - 2 * delta


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
    monkeypatch.setattr(lora, "merged_weight", ALWAYS[kind](publisher.model))  # type: ignore[arg-type]
    with pytest.raises(TrainingStopped):
        publisher.verify_at_start(0)


@pytest.mark.parametrize("kind", ALWAYS)
def test_a_merge_that_goes_wrong_later_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = make_publisher()
    publisher.verify_at_start(0)
    move(publisher.model, 0.02, seed=1)
    publisher.publish(1)
    monkeypatch.setattr(lora, "merged_weight", ALWAYS[kind](publisher.model))  # type: ignore[arg-type]
    with pytest.raises(TrainingStopped, match="not equal to the base matrix plus its adapter"):
        for step in range(2, 6):
            move(publisher.model, 0.02, seed=step)
            publisher.publish(step)


@pytest.mark.parametrize("kind", ["no adapter", "stale"])
def test_a_small_step_that_never_arrives_is_found_too(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = make_publisher()
    publisher.verify_at_start(0)
    monkeypatch.setattr(lora, "merged_weight", ALWAYS[kind](publisher.model))  # type: ignore[arg-type]
    with pytest.raises(TrainingStopped, match="not equal to the base matrix plus its adapter"):
        for step in range(1, 40):
            move(publisher.model, 1e-5, seed=step)
            publisher.publish(step)


# Sabotage of what the engine is handed, however small the step.


def hands_the_base(model: nn.Module, first: Weights) -> Iterator[tuple[str, Tensor]]:
    merged = {
        f"{path}.weight": layer.get_base_layer().weight for path, layer in lora.adapted_layers(model).items()
    }
    return ((name, merged.get(name, tensor).detach()) for name, tensor in named_weights(model))


def hands_a_stale_merge(model: nn.Module, first: Weights) -> Iterator[tuple[str, Tensor]]:
    adapted_ones, old = set(lora.adapted_layers(model)), dict(first)
    return (
        (name, old[name] if name.removesuffix(".weight") in adapted_ones else tensor)
        for name, tensor in named_weights(model)
    )


def hands_another_scale(model: nn.Module, first: Weights) -> Iterator[tuple[str, Tensor]]:
    other, adapted_ones = by_formula(model, scale=1.5), set(lora.adapted_layers(model))
    return (
        (name, other[name] if name.removesuffix(".weight") in adapted_ones else tensor)
        for name, tensor in named_weights(model)
    )


def hands_one_layer_without(model: nn.Module, first: Weights) -> Iterator[tuple[str, Tensor]]:
    old = dict(first)
    return (
        (name, old[name] if "layers.0.mlp.up_proj" in name else tensor)
        for name, tensor in named_weights(model)
    )


def hands_too_few(model: nn.Module, first: Weights) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor) for name, tensor in named_weights(model) if "o_proj" not in name)


@pytest.mark.parametrize(
    "wrong,message",
    [
        (hands_the_base, "14 of the weights listed for publication are stale"),
        (hands_a_stale_merge, "14 of the weights listed for publication are stale"),
        (hands_another_scale, "14 of the weights listed for publication are stale"),
        (
            hands_one_layer_without,
            "1 of the weights .* stale, the first is model.layers.0.mlp.up_proj.weight",
        ),
        (hands_too_few, "2 of 21 tensors were not sent, the first is model.layers.0.self_attn.o_proj"),
    ],
)
def test_other_weights_than_the_live_ones_are_found(
    wrong: Callable[[nn.Module, Weights], Weights], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotaged = make_publisher()
    sabotaged.verify_at_start(0)
    first = [(name, tensor.clone()) for name, tensor in named_weights(sabotaged.model)]
    move(sabotaged.model, 1e-6)
    monkeypatch.setattr(publish, "named_weights", lambda model: wrong(model, first))
    with pytest.raises(TrainingStopped, match=message):
        sabotaged.publish(1)


class EngineIgnoresLater(EngineIgnores):
    """Takes nothing after the verification at the start."""

    calls = 0


@pytest.mark.parametrize(
    "engine,size,message",
    [
        (EngineIgnoresLater, 3e-2, "14 of 21 tensors .* are not the trainer's"),
        (EngineIgnoresLater, 1e-6, "14 of 21 tensors .* are not the trainer's"),
        (LoadsIntoACopy, 1e-5, "21 of 21 tensors .* are not the trainer's"),
    ],
)
def test_an_engine_that_takes_nothing_is_found(
    engine: type[TransformersEngine], size: float, message: str
) -> None:
    sabotaged = make_publisher(engine=engine)
    with pytest.raises(TrainingStopped, match=message):
        sabotaged.verify_at_start(0)
        for step in range(1, 40):
            move(sabotaged.model, size, seed=step)
            sabotaged.publish(step)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("family", ["llama_tied", "gpt2"])
def test_a_part_of_any_tensor_that_is_stale_is_found(family: str, dtype: torch.dtype) -> None:
    publisher = make_publisher(family, dtype=dtype, engine=KeepsAPart)
    engine: Any = publisher.engine
    cases = every_part(publisher)
    assert {f"{path}.weight" for path in lora.adapted_layers(publisher.model)} < {name for name, _ in cases}  # type: ignore[arg-type]

    def plant(fault: Fault | None) -> None:
        engine.fault = fault

    # Products of adapters that moved further are too large for float16 in the end.
    by = functools.partial(move_everything, size=0.03)
    assert_all_are_found(publisher, publisher.verify_at_start, plant, by)
    assert_all_are_found(publisher, publisher.publish, plant, by)
    assert_each_is_found(publisher, publisher.publish, plant, of_each_kind(cases), by)
