"""Publication of weights: a sound engine passes, and each way to lose weights on the road is found."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from batches import END, PAD, VOCAB, make_model
from torch import Tensor
from transformers import PreTrainedModel

from torchrl_grpo.errors import TrainingStopped
from torchrl_grpo.inference import NextTokens, Probe
from torchrl_grpo.inference.transformers_engine import TransformersEngine
from torchrl_grpo.models.logprobs import TokenScorer
from torchrl_grpo.training.publish import (
    WeightPublisher,
    checksum,
    named_weights,
    perturbed,
    probe_prompts,
)

Weights = Iterable[tuple[str, Tensor]]


def prompts() -> list[list[int]]:
    g = torch.Generator().manual_seed(0)
    system = [9, 8, 7, 6, 5, 4]
    return probe_prompts([system + torch.randint(3, VOCAB, (20,), generator=g).tolist() for _ in range(4)])


def make_publisher(
    engine_type: type[TransformersEngine] = TransformersEngine,
    publisher_type: type[WeightPublisher] = WeightPublisher,
    family: str = "llama",
    dtype: torch.dtype = torch.float32,
    bound: float | None = None,
) -> WeightPublisher:
    # The engine starts with the weights of the trainer, as it does in a run.
    model = make_model(family)
    engine = engine_type(copy.deepcopy(model).to(dtype), [END], PAD)
    return publisher_type(model, TokenScorer(model), engine, prompts(), PAD, dtype, bound)


def update(model: PreTrainedModel | Any, size: float, seed: int = 0) -> None:
    """A random step on every weight, ``size`` times its own scale."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(size * p.abs().mean() * torch.randn(p.shape, generator=g))


@pytest.mark.parametrize("family", ["llama", "llama_tied", "gpt2", "qwen3"])
@pytest.mark.parametrize("size", [1e-7, 1e-5, 1e-3, 1e-1])
def test_a_sound_engine_passes_twenty_publications(family: str, size: float) -> None:
    publisher = make_publisher(family=family)
    publisher.prove_at_start(0)
    for step in range(1, 21):
        update(publisher.model, size, seed=step)
        metrics = publisher.publish(step)
        assert metrics["publish/gap"] < 1e-3
        assert publisher.engine.policy_version == step


@pytest.mark.parametrize("size", [1e-5, 1e-3, 1e-2])
def test_a_sound_engine_in_bfloat16_passes_too(size: float) -> None:
    publisher = make_publisher(dtype=torch.bfloat16)
    publisher.start_bound = publisher.bound = 2.0  # weights this large round far more than a real model's
    publisher.prove_at_start(0)
    for step in range(1, 21):
        update(publisher.model, size, seed=step)
        publisher.publish(step)
    assert publisher.engine.policy_version == 20


def test_a_generous_bound_still_lets_the_proof_at_the_start_work() -> None:
    assert make_publisher(bound=50.0).prove_at_start(0)["publish/gap"] < 1e-3
    with pytest.raises(TrainingStopped, match="moved by 0 nats"):
        make_publisher(LoadsIntoACopy, bound=50.0).prove_at_start(0)


def test_publication_makes_the_engine_answer_like_the_trainer() -> None:
    publisher = make_publisher()
    publisher.prove_at_start(0)
    update(publisher.model, 0.1)
    publisher.publish(1)
    answer = publisher.engine.next_tokens(Probe(prompts(), 10))
    ours = publisher.scorer.next_token_log_probs(*publisher._padded)
    torch.testing.assert_close(answer.log_probs, ours.topk(10).values.detach(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "llama_tied", "gpt2"])
def test_the_perturbation_at_the_start_is_put_back_bit_for_bit(family: str) -> None:
    publisher = make_publisher(family=family)
    before = {name: checksum(p) for name, p in publisher.model.named_parameters()}
    engine: Any = publisher.engine
    original = copy.deepcopy(engine.model.state_dict())
    metrics = publisher.prove_at_start(3)
    assert metrics["publish/perturbation"] > 0.02 and metrics["publish/gap"] < 1e-3
    for name, tensor in engine.model.state_dict().items():
        assert torch.equal(tensor.view(torch.int32), original[name].view(torch.int32)), name
    assert {name: checksum(p) for name, p in publisher.model.named_parameters()} == before
    assert engine.policy_version == 3


def test_the_bound_follows_the_gap_seen_at_the_start_unless_it_is_given() -> None:
    derived, given = make_publisher(), make_publisher(bound=0.5)
    derived.prove_at_start(0)
    given.prove_at_start(0)
    assert derived.bound == pytest.approx(1e-3)
    assert given.bound == 0.5


class ListSkips(WeightPublisher):
    """Forgets one tensor in the list that the engine is given."""

    sound = 0

    def _load(self, weights: Weights, *rest: Any) -> Any:
        self.sound -= 1
        if self.sound >= 0:
            return super()._load(weights, *rest)
        return super()._load(((n, t) for n, t in weights if "layers.1.mlp.down_proj" not in n), *rest)


class ListSkipsLater(ListSkips):
    """Forgets it only once the proof at the start is over."""

    sound = 2


class EngineSwallows(TransformersEngine):
    """Takes every tensor, so that the receipt is whole, and drops one of them."""

    sound = 0

    def load_weights(self, weights: Weights) -> None:
        self.sound -= 1
        dropped = "layers.1.mlp.down_proj" if self.sound < 0 else "none"
        super().load_weights((n, t) for n, t in weights if dropped not in n)


class EngineSwallowsLater(EngineSwallows):
    """Drops it only once the proof at the start is over."""

    sound = 2


class EngineStopsEarly(TransformersEngine):
    """Does not read the list to its end."""

    def load_weights(self, weights: Weights) -> None:
        iterator = iter(weights)
        super().load_weights(next(iterator) for _ in range(5))


class EngineIgnores(TransformersEngine):
    """Goes through the list after the first few calls and takes nothing."""

    calls = 0

    def load_weights(self, weights: Weights) -> None:
        self.calls += 1
        if self.calls <= 2:
            super().load_weights(weights)
        else:
            list(weights)


class LoadsIntoACopy(TransformersEngine):
    """The weights go into a model that does not answer."""

    def load_weights(self, weights: Weights) -> None:
        own, self.model = self.model, copy.deepcopy(self.model)
        super().load_weights(weights)
        self.model = own


class ListsACopy(WeightPublisher):
    """Lists the weights of a copy of the model that was made before training began."""

    def prove_at_start(self, version: int) -> dict[str, float]:
        self.stale = self.model
        metrics = super().prove_at_start(version)
        self.stale = copy.deepcopy(self.model)
        return metrics

    def _load(self, weights: Weights, *rest: Any) -> Any:
        return super()._load(named_weights(self.stale), *rest)


class Cached(TransformersEngine):
    """Remembers its answers to prompts, and says how much of the first prompt came out of the memory."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.memory: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def next_tokens(self, probe: Probe) -> NextTokens:
        prompts = probe.prompts
        known = tuple(prompts[0]) in self.memory
        fresh = super().next_tokens(probe)
        for row, prompt in enumerate(prompts):
            self.memory.setdefault(tuple(prompt), (fresh.token_ids[row], fresh.log_probs[row]))
        rows = [self.memory[tuple(prompt)] for prompt in prompts]
        ids, values = torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows])
        return NextTokens(ids, values, len(prompts[0]) if known else 0)

    def reset_cache(self) -> None:
        self.memory.clear()


class ForgetsToReset(Cached):
    """Serves cached states of old weights, and counts them."""

    def reset_cache(self) -> None:
        """Forget to forget."""


class ForgetsInSilence(Cached):
    """Serves its old answers after the third publication and reports nothing of it."""

    resets = 0

    def next_tokens(self, probe: Probe) -> NextTokens:
        answer = super().next_tokens(probe)
        return NextTokens(answer.token_ids, answer.log_probs, 0)

    def reset_cache(self) -> None:
        self.resets += 1
        if self.resets <= 2:
            super().reset_cache()


class AnswersNaN(TransformersEngine):
    """Computes garbage from some moment on."""

    healthy = 2

    def next_tokens(self, probe: Probe) -> NextTokens:
        self.healthy -= 1
        answer = super().next_tokens(probe)
        values = answer.log_probs if self.healthy >= 0 else torch.full_like(answer.log_probs, math.nan)
        return NextTokens(answer.token_ids, values, 0)


def train_and_publish(publisher: WeightPublisher, size: float) -> None:
    publisher.prove_at_start(0)
    for step in range(1, 4):
        update(publisher.model, size, seed=step)
        publisher.publish(step)


@pytest.mark.parametrize(
    "engine,publisher,size,message",
    [
        (TransformersEngine, ListSkips, 1e-7, "perturbed .* do not all reach the model that answers"),
        (TransformersEngine, ListSkipsLater, 1e-7, "1 tensors were not published, the first is .*down_proj"),
        (EngineSwallows, WeightPublisher, 1e-7, "perturbed .* do not all reach the model that answers"),
        (EngineSwallowsLater, WeightPublisher, 1e-2, "differ from the trainer's by up to .* load_weights"),
        (EngineStopsEarly, WeightPublisher, 1e-7, "perturbed .* do not all reach the model that answers"),
        (EngineIgnores, WeightPublisher, 1e-2, "differ from the trainer's by up to"),
        (EngineIgnores, WeightPublisher, 1e-5, "nearer to earlier weights .* load_weights"),
        (LoadsIntoACopy, WeightPublisher, 1e-7, "moved by 0 nats .* load_weights"),
        (TransformersEngine, ListsACopy, 1e-7, r"\d+ tensors were stale, the first is "),
        (ForgetsToReset, WeightPublisher, 1e-7, "40 tokens of the probe came out of a prefix cache"),
        (ForgetsInSilence, WeightPublisher, 1e-2, "differ from the trainer's by up to"),
        (ForgetsInSilence, WeightPublisher, 1e-5, "nearer to earlier weights .* reset_cache"),
        (AnswersNaN, WeightPublisher, 1e-7, "differ from the trainer's by up to nan"),
    ],
)
def test_sabotage_is_found(
    engine: type[TransformersEngine], publisher: type[WeightPublisher], size: float, message: str
) -> None:
    sabotaged = make_publisher(engine, publisher)
    with pytest.raises(TrainingStopped, match=message) as caught:
        train_and_publish(sabotaged, size)
    assert engine.__name__ in str(caught.value)
    # The version must not claim weights that the engine does not hold.
    assert sabotaged.engine.policy_version < 3


def test_a_resumed_run_is_judged_by_its_start_unless_the_user_or_the_formats_say_otherwise() -> None:
    saved = make_publisher(TransformersEngine)
    saved.prove_at_start(0)
    state = saved.state_dict()
    same, wider, other = (make_publisher(TransformersEngine) for _ in range(3))
    same.load_state_dict(state)
    assert same.bound == saved.bound < saved.start_bound
    # As the message of a failed proof says.
    wider.bound, wider._derive_bound = 3.0, False
    wider.load_state_dict(state)
    assert wider.bound == 3.0
    # Noise of float32 would condemn every answer in bfloat16.
    other.load_state_dict({**state, "precision": "torch.bfloat16", "bound": 0.0})
    assert other.bound == other.start_bound
    other.prove_at_start(2)
    assert other.bound == pytest.approx(saved.bound)


@pytest.mark.parametrize("engine,stopped", [(EngineIgnores, True), (TransformersEngine, False)])
def test_updates_smaller_than_the_rounding_add_up_until_a_stale_engine_is_seen(
    engine: type[TransformersEngine], stopped: bool
) -> None:
    publisher = make_publisher(engine)
    publisher.prove_at_start(0)
    # As in a 16-bit format: the bound is wide, and one update disappears in the noise.
    update(publisher.model, 1e-5)
    shift = float((publisher._trainer_view() - publisher._anchor).abs().max())
    publisher.load_state_dict({"noise": shift, "bound": 10.0})
    versions = iter(range(1, 200))
    if stopped:
        with pytest.raises(TrainingStopped, match="nearer to earlier weights"):
            for version in versions:
                update(publisher.model, 1e-5, seed=version)
                publisher.publish(version)
        assert 1 < next(versions) < 100
    else:
        for version in versions:
            update(publisher.model, 1e-5, seed=version)
            publisher.publish(version)


def test_the_engine_that_caches_and_resets_passes() -> None:
    publisher = make_publisher(Cached)
    train_and_publish(publisher, 1e-2)
    assert publisher.engine.policy_version == 3


def test_an_engine_that_answers_nan_at_the_start_is_found() -> None:
    publisher = make_publisher(AnswersNaN)
    publisher.engine.healthy = 0  # type: ignore[attr-defined]
    with pytest.raises(TrainingStopped, match="moved by nan nats"):
        publisher.prove_at_start(0)


def test_the_receipt_is_of_what_the_engine_took() -> None:
    publisher = make_publisher()
    live = {name: checksum(tensor) for name, tensor in publisher.model.named_parameters()}
    receipt, _ = publisher._load(named_weights(publisher.model), 0, publisher.engine.publish)
    assert receipt == live


def by_hand(data: bytes) -> int:
    """Words of eight bytes, and the bytes left over, as Python adds them."""
    whole = len(data) // 8 * 8
    words = sum(int.from_bytes(data[at : at + 8], sys.byteorder) for at in range(0, whole, 8)) % 2**64
    return (words if words < 2**63 else words - 2**64) + sum(data[whole:])


def test_a_checksum_is_a_sum_of_words_and_takes_no_copy() -> None:
    for shape in ((), (0,), (3,), (2**12,), (3, 2**8 + 5)):
        tensor = torch.randn(shape)
        assert checksum(tensor) == by_hand(tensor.numpy().tobytes())
    # Words of it begin in the middle of those of the tensor that it is a part of.
    part = torch.randn(101)[1:]
    assert checksum(part) == checksum(part.clone()) == by_hand(part.numpy().tobytes())
    large = torch.randn(2**22).to(torch.bfloat16)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as seen:
        checksum(large)
    largest = max(event.cpu_memory_usage for event in seen.events())
    assert largest < large.nbytes / 100


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_checksum_sees_one_bit_and_not_the_layout(dtype: torch.dtype) -> None:
    tensor = torch.randn(6, 5).to(dtype)
    other = tensor.clone()
    other[3, 2] = torch.nextafter(other[3, 2], torch.tensor(9.0, dtype=dtype))
    assert checksum(tensor) == checksum(tensor.clone()) == checksum(tensor.t().contiguous().t())
    assert checksum(tensor) != checksum(other)


@pytest.mark.parametrize("lengths", [[30], [3], [1], [50, 60, 70], [200] * 8])
def test_probe_prompts_have_their_length_and_no_common_beginning(lengths: list[int]) -> None:
    system = [1, 2, 3]
    g = torch.Generator().manual_seed(1)
    prompts = [(system + torch.randint(3, VOCAB, (n,), generator=g).tolist())[: max(n, 1)] for n in lengths]
    probes: list[list[int]] = probe_prompts(prompts, count=3, length=80)
    assert [len(p) for p in probes] == [80] * 3
    if sum(lengths) > 3:
        assert len({tuple(p[:16]) for p in probes}) == 3
