"""Publication of weights: a sound engine passes, and each way to lose weights on the road is found."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import pytest
import torch
from batches import END, PAD, VOCAB, make_model
from faulty_engines import EngineIgnores, LoadsIntoACopy, prompts
from publishers import Direct
from slow_cases import slow_except
from stale_parts import (
    FORMATS,
    Fault,
    KeepsAPart,
    assert_all_are_found,
    assert_each_is_found,
    every_part,
    held_by,
    of_each_kind,
)
from torch import Tensor
from transformers import PreTrainedModel

from torchrl_grpo.errors import TrainingStopped
from torchrl_grpo.inference import Probe, ProbeResult
from torchrl_grpo.inference.checksums import Checksums, checksum, checksum_tensor
from torchrl_grpo.inference.transformers_engine import TransformersEngine
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.weight_sync import publisher as publish
from torchrl_grpo.weight_sync.probe import named_weights, perturbed, probe_length, probe_prompts
from torchrl_grpo.weight_sync.publisher import WeightPublisher

Weights = Iterable[tuple[str, Tensor]]


def make_publisher(
    engine_type: type[TransformersEngine] = TransformersEngine,
    publisher_type: type[WeightPublisher] = WeightPublisher,
    family: str = "llama",
    dtype: torch.dtype = torch.float32,
    bound: float | None = None,
    warn: Callable[[str], None] = lambda text: None,
    backend: str = "vllm",
) -> WeightPublisher:
    # The engine starts with the weights of the trainer, as it does in a run.
    model = make_model(family)
    engine = engine_type(copy.deepcopy(model).to(dtype), [END], PAD)
    return publisher_type(
        model,
        TokenScorer(model),
        engine=engine,
        probe_prompts=prompts(),
        pad_token_id=PAD,
        precision=dtype,
        engine_dtype=dtype,
        transport=Direct(engine),
        bound=bound,
        warn=warn,
        backend=backend,
    )


def update(model: PreTrainedModel | Any, size: float, seed: int = 0) -> None:
    """A random step on every weight, ``size`` times its own scale."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(size * p.abs().mean() * torch.randn(p.shape, generator=g))


@pytest.mark.parametrize("family", slow_except(["llama_tied"], ["llama_tied", "gpt2", "qwen3"]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-7, 1e-4, 1e-1])
def test_a_sound_engine_passes_ten_publications(family: str, dtype: torch.dtype, size: float) -> None:
    # Weights this large round far more than a real model's: the answers are apart, the weights are not.
    publisher = make_publisher(family=family, dtype=dtype)
    publisher.verify_at_start(0)
    for step in range(1, 11):
        update(publisher.model, size, seed=step)
        metrics = publisher.publish(step)
        if dtype is torch.float32:
            assert metrics["publish/logprob_diff_max"] < 1e-3
        assert publisher.engine.policy_version == step
    assert publisher.unreadable == []


NINE = ["llama_tied", "qwen2", "qwen3", "mistral", "gpt2", "gemma", "gemma3", "phi", "phi3"]


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("family", slow_except(["llama_tied", "gpt2"], NINE))
def test_a_part_of_any_tensor_that_is_stale_is_found(family: str, dtype: torch.dtype) -> None:
    publisher = make_publisher(KeepsAPart, family=family, dtype=dtype)
    engine: Any = publisher.engine

    def plant(fault: Fault | None) -> None:
        engine.fault = fault

    assert_all_are_found(publisher, publisher.verify_at_start, plant)
    assert_each_is_found(publisher, publisher.verify_at_start, plant, of_each_kind(every_part(publisher))[:1])
    assert_all_are_found(publisher, publisher.publish, plant)
    assert_each_is_found(publisher, publisher.publish, plant, of_each_kind(every_part(publisher)))


def test_the_start_shows_that_published_weights_are_those_that_answer() -> None:
    with pytest.raises(TrainingStopped, match="log-probabilities changed by 0 nats"):
        make_publisher(AnswersFromACopy, bound=50.0).verify_at_start(0)


@pytest.mark.parametrize(("backend", "advised"), [("vllm", True), ("transformers", False)])
def test_nobody_is_sent_to_the_engine_that_failed(backend: str, advised: bool) -> None:
    for engine in (AnswersFromACopy, KeepsAPart):
        publisher = make_publisher(engine, backend=backend)
        if isinstance(publisher.engine, KeepsAPart):
            name, _ = next(iter(named_weights(publisher.model)))
            publisher.engine.fault = Fault("tensor", held_by(publisher, [name]))
        with pytest.raises(TrainingStopped) as stopped:
            publisher.verify_at_start(0)
        assert ("backend=transformers" in str(stopped.value)) == advised
        assert ("defect of the program" in str(stopped.value)) == (not advised)


def test_publication_makes_the_engine_answer_like_the_trainer() -> None:
    publisher = make_publisher()
    publisher.verify_at_start(0)
    update(publisher.model, 0.1)
    publisher.publish(1)
    engine: Any = publisher.engine
    result = engine.next_tokens(Probe(prompts(), 10))
    expected = publisher.scorer.next_token_log_probs(*publisher._padded)
    torch.testing.assert_close(result.log_probs, expected.topk(10).values.detach(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "llama_tied", "gpt2"])
def test_the_perturbation_at_the_start_is_put_back_bit_for_bit(family: str) -> None:
    publisher = make_publisher(family=family)
    before = {name: checksum(p) for name, p in publisher.model.named_parameters()}
    engine: Any = publisher.engine
    original = copy.deepcopy(engine.model.state_dict())
    metrics = publisher.verify_at_start(3)
    assert metrics["publish/perturbation"] > 0.02 and metrics["publish/logprob_diff_max"] < 1e-3
    for name, tensor in engine.model.state_dict().items():
        assert torch.equal(tensor.view(torch.int32), original[name].view(torch.int32)), name
    assert {name: checksum(p) for name, p in publisher.model.named_parameters()} == before
    assert engine.policy_version == 3


def test_the_bound_follows_what_is_seen_at_the_start_unless_it_is_given() -> None:
    derived, fixed = make_publisher(), make_publisher(bound=0.5)
    derived.verify_at_start(0)
    fixed.verify_at_start(0)
    assert derived.bound == pytest.approx(1e-3)
    assert fixed.bound == 0.5
    resumed, changed = make_publisher(), make_publisher(bound=0.7)
    for publisher in (resumed, changed):
        publisher.load_state_dict({"noise": 0.1, "bound": 0.3, "precision": "float32"})
        publisher.verify_at_start(4)
    assert resumed.bound == 0.3, "the bound is the one of the run's start"
    assert changed.bound == 0.7, "what is written now counts"


class AnswersElsewhere(TransformersEngine):
    """Holds the right weights and answers something else by so many nats."""

    off = 0.0

    def next_tokens(self, probe: Probe) -> ProbeResult:
        result = super().next_tokens(probe)
        return ProbeResult(result.token_ids, result.log_probs - self.off, 0)


class CannotBeRead(AnswersElsewhere):
    """An engine that computes with a tensor which cannot be read back."""

    def checksums(self) -> tuple[Checksums, ...]:
        (checksums,) = super().checksums()
        hidden = "model.layers.1.mlp.down_proj.weight"
        return (Checksums(checksums.dtype, {n: v for n, v in checksums.values.items() if n != hidden}),)


def test_answers_far_from_the_trainers_are_a_warning_where_the_weights_are_known() -> None:
    messages: list[str] = []
    publisher = make_publisher(AnswersElsewhere, warn=messages.append)
    publisher.verify_at_start(0)
    publisher.engine.off = 0.3  # type: ignore[attr-defined]
    for version in (1, 2):
        assert publisher.publish(version)["publish/logprob_diff_mean"] == pytest.approx(0.3, abs=1e-3)
    assert len(messages) == 1 and "0.3 nats on average" in messages[0] and "bit for bit" in messages[0]


def test_how_far_an_update_moves_the_policy() -> None:
    publisher = make_publisher()
    publisher.verify_at_start(0)
    before = publisher._trainer_log_probs().double()
    assert publisher.publish(0)["publish/update_kl"] == 0.0
    update(publisher.model, 1e-2)
    after = publisher._trainer_log_probs().double()
    moved = float((before.exp() * (before - after)).sum(1).mean())
    assert publisher.publish(1)["publish/update_kl"] == pytest.approx(moved) and moved > 1e-6


def test_answers_are_what_counts_where_a_tensor_cannot_be_read() -> None:
    publisher = make_publisher(CannotBeRead)
    metrics = publisher.verify_at_start(0)
    assert publisher.unreadable == ["model.layers.1.mlp.down_proj.weight"]
    assert "(1 cannot be read back, e.g. model.layers.1.mlp.down_proj.weight)" in publisher.summary(metrics)
    update(publisher.model, 1e-2)
    publisher.publish(1)
    publisher.engine.off = 0.3  # type: ignore[attr-defined]
    with pytest.raises(
        TrainingStopped, match=r"cannot be read back.*inference_model.max_logprob_diff=0.6 with"
    ):
        publisher.publish(2)
    # By this run's own initial difference, whatever the dtype: a bound for all would let much more pass.
    rounded = make_publisher(CannotBeRead, dtype=torch.bfloat16)
    initial_diff = rounded.verify_at_start(0)["publish/logprob_diff_mean"]
    rounded.engine.off = 3 * initial_diff + 0.01  # type: ignore[attr-defined]
    assert 4 * initial_diff < rounded.bound
    rounded.publish(1)
    rounded.engine.off = 6 * initial_diff + 0.01  # type: ignore[attr-defined]
    with pytest.raises(TrainingStopped, match="cannot be read back"):
        rounded.publish(2)
    raised = make_publisher(CannotBeRead, bound=0.6)
    raised.verify_at_start(0)
    raised.engine.off = 0.3  # type: ignore[attr-defined]
    raised.publish(2)


def test_engines_that_compute_in_another_format_are_told_from_stale_ones() -> None:
    publisher = make_publisher()
    publisher.engine.model.to(torch.bfloat16)  # type: ignore[attr-defined]
    with pytest.raises(TrainingStopped, match=r"computes in bfloat16.*inference_model.dtype=bfloat16"):
        publisher.verify_at_start(0)


class ListSkips(WeightPublisher):
    """Forgets one tensor in the list that the engine is given."""

    sound = 0

    def _cast_and_checksum(self, sums: Any) -> Any:
        self.sound -= 1
        for name, tensor in super()._cast_and_checksum([]):
            if self.sound >= 0 or "layers.1.mlp.down_proj" not in name:
                sums.append((name, checksum_tensor(tensor)))
                yield name, tensor


class ListSkipsLater(ListSkips):
    """Forgets it only after the verification at the start."""

    sound = 2


class EngineSwallows(TransformersEngine):
    """Takes every tensor and drops one of them."""

    sound = 0

    def update(self, weights: Weights) -> None:
        self.sound -= 1
        dropped = "layers.1.mlp.down_proj" if self.sound < 0 else "none"
        super().update((n, t) for n, t in weights if dropped not in n)


class EngineSwallowsLater(EngineSwallows):
    """Drops it only after the verification at the start."""

    sound = 2


class EngineStopsEarly(TransformersEngine):
    """Does not read the list to its end."""

    def update(self, weights: Weights) -> None:
        iterator = iter(weights)
        super().update(next(iterator) for _ in range(5))


class AnswersFromACopy(TransformersEngine):
    """Holds what was published, and answers with what it began with, as a graph of older memory would."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.first = copy.deepcopy(self.model)

    def next_tokens(self, probe: Probe) -> ProbeResult:
        own, self.model = self.model, self.first
        result = super().next_tokens(probe)
        self.model = own
        return result


class ListsACopy(WeightPublisher):
    """Lists the weights of a copy of the model that was made before training began."""

    def verify_at_start(self, version: int) -> dict[str, float]:
        metrics = super().verify_at_start(version)
        self.copy = copy.deepcopy(self.model)
        return metrics

    def _cast_and_checksum(self, sums: Any) -> Any:
        if not hasattr(self, "copy"):
            return super()._cast_and_checksum(sums)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(publish, "named_weights", lambda model: named_weights(self.copy))
            return iter(list(super()._cast_and_checksum(sums)))


class MistakesNames(TransformersEngine):
    """Puts the gate of a layer where its other half belongs, always and consistently."""

    swap: ClassVar = {"gate_proj": "up_proj", "up_proj": "gate_proj"}

    def update(self, weights: Weights) -> None:
        super().update((self._renamed(name), tensor) for name, tensor in weights)

    def _held(self) -> Any:
        return ((self._renamed(name), tensor) for name, tensor in super()._held())

    def _renamed(self, name: str) -> str:
        return ".".join(self.swap.get(part, part) for part in name.split("."))


class SwapsRows(TransformersEngine):
    """Every publication puts two embedding rows of tokens outside the probe into each other's place."""

    def update(self, weights: Weights) -> None:
        super().update(weights)
        used = {token for prompt in prompts() for token in prompt}
        first, second = [token for token in range(3, VOCAB) if token not in used][:2]
        rows = self.model.get_input_embeddings().weight.detach()
        rows[[first, second]] = rows[[second, first]]


class Cached(TransformersEngine):
    """Remembers its answers to prompts, and says how much of the first prompt came out of the memory."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.memory: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def next_tokens(self, probe: Probe) -> ProbeResult:
        prompts = probe.prompts
        known = tuple(prompts[0]) in self.memory
        fresh = super().next_tokens(probe)
        for row, prompt in enumerate(prompts):
            self.memory.setdefault(tuple(prompt), (fresh.token_ids[row], fresh.log_probs[row]))
        rows = [self.memory[tuple(prompt)] for prompt in prompts]
        ids, values = torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows])
        return ProbeResult(ids, values, len(prompts[0]) if known else 0)

    def reset_cache(self) -> None:
        self.memory.clear()


class ForgetsToReset(Cached):
    """Serves cached states of old weights, and counts them."""

    def reset_cache(self) -> None:
        """Forget to forget."""


class ForgetsInSilence(Cached):
    """Serves its old answers after the third publication and reports nothing of it."""

    resets = 0

    def next_tokens(self, probe: Probe) -> ProbeResult:
        result = super().next_tokens(probe)
        return ProbeResult(result.token_ids, result.log_probs, 0)

    def reset_cache(self) -> None:
        self.resets += 1
        if self.resets <= 3:
            super().reset_cache()


class AnswersNaN(TransformersEngine):
    """Computes garbage from some moment on."""

    healthy = 3

    def next_tokens(self, probe: Probe) -> ProbeResult:
        self.healthy -= 1
        result = super().next_tokens(probe)
        values = result.log_probs if self.healthy >= 0 else torch.full_like(result.log_probs, math.nan)
        return ProbeResult(result.token_ids, values, 0)


def train_and_publish(publisher: WeightPublisher, size: float) -> None:
    publisher.verify_at_start(0)
    for step in range(1, 4):
        update(publisher.model, size, seed=step)
        publisher.publish(step)


@pytest.mark.parametrize(
    "engine,publisher,message",
    [
        (TransformersEngine, ListSkips, "1 of 21 tensors were not sent, the first is .*down_proj"),
        (TransformersEngine, ListSkipsLater, "1 of 21 tensors were not sent, .*down_proj"),
        (EngineSwallows, WeightPublisher, "1 of 21 tensors .* are not the trainer's .*down_proj"),
        (EngineSwallowsLater, WeightPublisher, "1 of 21 tensors .* are not the trainer's .*down_proj"),
        (EngineStopsEarly, WeightPublisher, "16 of 21 tensors were not sent"),
        (EngineIgnores, WeightPublisher, "21 of 21 tensors .* are not the trainer's"),
        (LoadsIntoACopy, WeightPublisher, "21 of 21 tensors .* are not the trainer's"),
        (SwapsRows, WeightPublisher, "1 of 21 tensors .* are not .*embed_tokens"),
        (MistakesNames, WeightPublisher, "assigns tensors to the wrong parameters"),
        (AnswersFromACopy, WeightPublisher, "log-probabilities changed by 0 nats .*enforce_eager"),
        (TransformersEngine, ListsACopy, "listed for publication are stale, the first is "),
        (ForgetsToReset, WeightPublisher, "40 tokens of the probe came out of a prefix cache"),
        (AnswersNaN, WeightPublisher, "by nan nats .*not finite"),
    ],
)
def test_sabotage_is_found(
    engine: type[TransformersEngine], publisher: type[WeightPublisher], message: str
) -> None:
    sabotaged = make_publisher(engine, publisher)
    with pytest.raises(TrainingStopped, match=message) as caught:
        train_and_publish(sabotaged, 1e-7)
    assert engine.__name__ in str(caught.value)
    # The version must not claim weights that the engine does not hold.
    assert sabotaged.engine.policy_version < 3


def test_old_answers_that_nobody_reports_are_warned_of() -> None:
    messages: list[str] = []
    train_and_publish(make_publisher(ForgetsInSilence, warn=messages.append), 1e-2)
    assert len(messages) == 1 and "nats on average" in messages[0]


def test_the_engine_that_caches_and_resets_passes() -> None:
    publisher = make_publisher(Cached)
    train_and_publish(publisher, 1e-2)
    assert publisher.engine.policy_version == 3


def test_an_engine_that_answers_nan_at_the_start_is_found() -> None:
    publisher = make_publisher(AnswersNaN)
    publisher.engine.healthy = 1  # type: ignore[attr-defined]
    with pytest.raises(TrainingStopped, match=r"by nan nats on average .*not finite"):
        publisher.verify_at_start(0)


def test_tied_weights_are_listed_once_and_nothing_is_copied() -> None:
    model = make_model("llama_tied")
    listed = dict(named_weights(model))
    assert listed.keys() == dict(model.named_parameters()).keys()
    assert "lm_head.weight" not in listed and "model.embed_tokens.weight" in listed
    assert all(t.data_ptr() == p.data_ptr() for t, p in zip(listed.values(), model.parameters(), strict=True))
    assert not any(t.requires_grad for t in listed.values())


def test_every_parameter_is_perturbed_and_comes_back_bit_for_bit_even_after_an_error() -> None:
    model = make_model("gpt2")
    before = {n: checksum(p) for n, p in model.named_parameters()}
    nonzero = {n for n, p in model.named_parameters() if p[..., ::8].any()}
    with pytest.raises(RuntimeError, match="in between"), perturbed(model):
        changed = {n for n, p in model.named_parameters() if checksum(p) != before[n]}
        raise RuntimeError("in between")
    assert changed == nonzero and len(changed) > 10
    assert {n: checksum(p) for n, p in model.named_parameters()} == before


def test_small_numbers_of_float16_come_back_too() -> None:
    model = make_model().half()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 2.0**-18  # among those that lose a bit when they are halved
    before = {n: checksum(p) for n, p in model.named_parameters()}
    with perturbed(model):
        assert {n: checksum(p) for n, p in model.named_parameters()} != before
    assert {n: checksum(p) for n, p in model.named_parameters()} == before


@pytest.mark.parametrize("lengths", [[30], [3], [1], [50, 60, 70], [200] * 8])
def test_probe_prompts_have_their_length_and_no_common_beginning(lengths: list[int]) -> None:
    system = [1, 2, 3]
    g = torch.Generator().manual_seed(1)
    prompts = [(system + torch.randint(3, VOCAB, (n,), generator=g).tolist())[: max(n, 1)] for n in lengths]
    probes: list[list[int]] = probe_prompts(prompts, count=3, length=80)
    assert [len(p) for p in probes] == [80] * 3
    if sum(lengths) > 3:
        assert len({tuple(p[:16]) for p in probes}) == 3


@pytest.mark.parametrize(
    ("block_size", "max_model_len", "length"),
    [(None, 512, 40), (32, 512, 40), (128, 512, 136), (128, 64, 63)],
)
def test_a_probe_fills_more_than_a_block_of_the_cache(
    block_size: int | None, max_model_len: int, length: int
) -> None:
    assert probe_length(block_size, max_model_len) == length
