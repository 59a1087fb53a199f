"""The real vLLM holding the real SmolLM2: log-probabilities, publication, its verification, and sabotage."""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from episodes import check_tokens, problems, record, talking
from publishers import Direct
from torch import Tensor
from torch._dynamo import convert_frame
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from vllm_arguments import ON_A_CPU, TINY_ENGINE, quick_engines

from torchrl_grpo.batch.schema import build_batch, collate
from torchrl_grpo.envs.chat import render
from torchrl_grpo.envs.decoding import decode
from torchrl_grpo.errors import ModelError, TrainingStopped
from torchrl_grpo.inference import vllm_weights
from torchrl_grpo.inference.protocol import Completion, Probe, Request, Sampling
from torchrl_grpo.inference.vllm_engine import VLLMEngine
from torchrl_grpo.models.scoring.padding import pad_left, pad_right
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.weight_sync import publisher as publish
from torchrl_grpo.weight_sync.probe import probe_prompts
from torchrl_grpo.weight_sync.publisher import WeightPublisher

pytestmark = [pytest.mark.integration, pytest.mark.slow]

EPISODES = 8
QUESTIONS = ("What is 3 + 4?", "Name a color, please.", "Who wrote Hamlet? Answer in one word.")


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16])
def engine(smollm2_dir: Path, request: pytest.FixtureRequest) -> Iterator[VLLMEngine]:
    with quick_engines():
        # vLLM fills its cache with zeros, which takes a second for a GiB.
        sizes: dict[str, Any] = {
            "max_model_len": 256,
            "max_num_seqs": 16,
            "engine_args": {"num_gpu_blocks_override": 256},
        }
        engine = VLLMEngine(str(smollm2_dir), dtype=request.param, **ON_A_CPU, **sizes)
        yield engine
        engine.close()


# What follows from a log-probability being right in either format is tried in the one that is tighter, and
# faults of tensors, which test_vllm_families.py tries in all formats, in the other.
in_float32 = pytest.mark.parametrize("engine", [torch.float32], indirect=True)
in_bfloat16 = pytest.mark.parametrize("engine", [torch.bfloat16], indirect=True)


def test_float32_is_float32_in_kernels_of_triton_too(engine: VLLMEngine) -> None:
    # Its default for GPUs is TF32, which has ten bits; the trainer is compared with far closer than that.
    assert os.environ["TRITON_F32_DEFAULT"] == "ieee"


@pytest.fixture(scope="module")
def prompts(smollm2_dir: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]


@dataclass
class Trained:
    """The model that an engine serves, and the publisher between them.

    Attributes:
        model: in float32, with the weights that the engine has.
        publisher: has verified publication once.
        metrics: metrics of that verification.
    """

    model: PreTrainedModel
    publisher: WeightPublisher
    metrics: dict[str, float]


@pytest.fixture(scope="module")
def trained(engine: VLLMEngine, smollm2_dir: Path, prompts: list[list[int]]) -> Trained:
    """One model and one verification for all tests of an engine: on the real model each takes seconds."""
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()
    publisher = WeightPublisher(
        model,
        TokenScorer(model, 1.0),
        engine=engine,
        probe_prompts=probe_prompts(prompts),
        pad_token_id=2,
        precision=torch.float32,
        engine_dtype=engine.dtype,
        transport=Direct(engine),
    )
    return Trained(model, publisher, publisher.verify_at_start(0))


def nudge(model: PreTrainedModel, size: float, seed: int = 0) -> None:
    """An update of the size an optimizer makes, on every weight."""
    # Drawing a number for each weight takes a second.
    noise = torch.randn(2**20, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for parameter in model.parameters():
            for part in parameter.view(-1).split(len(noise)):
                part.add_(noise[: len(part)], alpha=size)


def test_log_probs_are_the_trainers_at_the_sampling_temperature(
    engine: VLLMEngine, trained: Trained, prompts: list[list[int]]
) -> None:
    sampling = Sampling(num_samples=4, max_new_tokens=12, temperature=0.7, seeds=[11, 22, 33])
    completions = engine.generate(prompts, sampling)
    flat = [completion for group in completions for completion in group]
    prompt, prompt_mask = pad_left(prompts, 2)
    response, mask = pad_right([completion.token_ids for completion in flat], 2, torch.int64)
    engine_log_probs, _ = pad_right([completion.log_probs for completion in flat], 0.0, torch.float32)
    shape = (len(prompts), 4, -1)
    with torch.no_grad():
        scores = TokenScorer(trained.model, 0.7)(prompt, prompt_mask, response.view(shape), mask.view(shape))
    gap = (scores.log_probs - engine_log_probs.view(shape)).abs()
    assert gap.max() < (2e-3 if engine.dtype is torch.float32 else 1.0)
    assert gap[mask.view(shape)].mean() < (1e-4 if engine.dtype is torch.float32 else 0.1)
    assert len({tuple(completion.token_ids) for completion in completions[0]}) > 1, "siblings must differ"
    assert all(completion.finish_reason in ("stop", "length") for completion in flat)
    engine.reset_cache()
    assert engine.generate(prompts, sampling) == completions, "equal seeds must give equal responses"


def test_a_token_of_the_request_ends_a_response(engine: VLLMEngine, prompts: list[list[int]]) -> None:
    ((whole,),) = engine.generate(prompts[:1], Sampling(1, 8, 0.0, ignore_eos=True))
    last = whole.token_ids[3]
    engine.submit([Request("a", prompts[0], 8, 0.0, stop_token_ids=(last,))])
    completions: dict[Hashable, Completion] = {}
    while not completions:
        completions.update(engine.step())
    assert completions["a"].token_ids == whole.token_ids[: whole.token_ids.index(last) + 1]
    assert completions["a"].finish_reason == "stop"


@in_float32
def test_episodes_of_the_real_model_are_what_the_engine_saw_and_sampled(
    engine: VLLMEngine, trained: Trained, smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    calls = record(engine, monkeypatch)
    examples = problems(EPISODES // 4)
    for example in examples:
        # After short answers, the model's own are short too, and an episode has several turns.
        shown = [("user", "What is 5 + 2?"), ("assistant", "7"), ("user", "Is it?"), ("assistant", "Yes")]
        example.messages[:0] = [{"role": role, "content": content} for role, content in shown]
    prompts = [render(tokenizer, example)[1] for example in examples]
    seeds = [10 * number for number in range(len(examples))]
    episodes = talking(engine, tokenizer, max_turns=4, max_episodes=16)
    groups = episodes.generate(prompts, Sampling(4, 48, 1.0, seeds=seeds, problems=examples))
    assert check_tokens(prompts, groups, calls) > EPISODES, "episodes of one turn test nothing"
    rows = [completion.token_ids for group in groups for completion in group]
    assert [decode(tokenizer, row) for row in rows] == [tokenizer.decode(row) for row in rows]
    round_ = build_batch(
        prompts, groups, torch.zeros(len(examples), 4, 1), torch.zeros(len(examples), 4, 0),
        torch.zeros(len(examples), 4, dtype=torch.int64), 0, 2,
    )  # fmt: skip
    batch = collate(round_.unbind(0))
    tokens, masks = batch["tokens"], batch["masks"]
    with torch.no_grad():
        scores = TokenScorer(trained.model, 1.0)(
            tokens["prompt"], masks["prompt"], tokens["response"], masks["response"]
        )
    gap = (scores.log_probs - batch["log_probs", "response"])[masks["sampled"]].abs()
    assert gap.max() < 2e-3 and gap.mean() < 1e-4


def test_publications_pass_and_change_the_answers(engine: VLLMEngine, trained: Trained) -> None:
    publisher, at_start = trained.publisher, trained.metrics
    far = 1e-3 if engine.dtype is torch.float32 else 2.0
    assert at_start["publish/logprob_diff_max"] < far and at_start["publish/perturbation"] > 0.5
    assert publisher.unreadable == [], "every tensor can be read"
    for version in (1, 2):
        nudge(trained.model, 1e-4, version)
        metrics = publisher.publish(version)
        assert metrics["publish/logprob_diff_mean"] < publisher.bound
        assert metrics["publish/logprob_diff_max"] < far
    assert engine.policy_version == 2


class SkipsHead(VLLMEngine):
    """The tied output head keeps its packed copy of older weights."""

    def finish_update(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self._weights, "_repack_tied_heads", lambda: None)
            patch.setattr(vllm_weights, "repack_kept", lambda model: None)
            super().finish_update()


class LoadsIntoACopy(VLLMEngine):
    """Takes the weights, and answers with others."""

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        list(weights)


class KeepsAnElement(VLLMEngine):
    """One number in the middle of a fused matrix stays what it was."""

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().update((name, self._spoiled(name, tensor)) for name, tensor in weights)

    def _spoiled(self, name: str, tensor: Tensor) -> Tensor:
        if name != "model.layers.7.self_attn.k_proj.weight":
            return tensor
        spoiled = tensor.clone()
        spoiled[100, 300] = torch.nextafter(spoiled[100, 300], torch.tensor(9.0, dtype=tensor.dtype))
        return spoiled


class SwapsRows(KeepsAnElement):
    """Two rows of the embedding, and so of the output head, change places."""

    def _spoiled(self, name: str, tensor: Tensor) -> Tensor:
        if name != "model.embed_tokens.weight":
            return tensor
        swapped = tensor.clone()
        swapped[[40_000, 40_001]] = swapped[[40_001, 40_000]]
        return swapped


class ForgetsTheCache(VLLMEngine):
    """Keeps key/value states of older weights."""

    def reset_cache(self) -> None:
        pass


# Every fault of a tensor is tried at both moments with tiny models of ten families: test_vllm_families.py.
@in_bfloat16
@pytest.mark.parametrize(
    ("sabotage", "moment", "message"),
    [
        (LoadsIntoACopy, "start", r"\d+ of 272 tensors that it computes with are not the trainer's"),
        (LoadsIntoACopy, "later", r"\d+ of 272 tensors that it computes with are not the trainer's"),
        (SkipsHead, "start", "1 of 272 tensors .* first is model.embed_tokens.weight"),
        (KeepsAnElement, "later", "1 of 272 tensors .* first is model.layers.7.self_attn.k_proj.weight"),
        (SwapsRows, "later", "1 of 272 tensors .* first is model.embed_tokens.weight"),
        (ForgetsTheCache, "start", "prefix cache"),
        (ForgetsTheCache, "later", "prefix cache"),
    ],
)
def test_a_sabotaged_engine_is_stopped(
    engine: VLLMEngine,
    trained: Trained,
    sabotage: type[VLLMEngine],
    moment: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step: Callable[[int], object] = trained.publisher.verify_at_start
    if moment == "later":
        nudge(trained.model, 1e-4)
        step = trained.publisher.publish
    with monkeypatch.context() as patch:
        # The object is the healthy engine; only its behavior is swapped, so that one engine serves all cases.
        patch.setattr(engine, "__class__", sabotage)
        with pytest.raises(TrainingStopped, match=message):
            step(1)


@in_bfloat16
@pytest.mark.parametrize("kind", ["skip", "stale"])
def test_a_sabotaged_list_of_weights_is_stopped_however_small_the_update(
    trained: Trained, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = publish.named_weights  # type: ignore[attr-defined]
    old = copy.deepcopy(trained.model)
    nudge(trained.model, 1e-9)
    listed: list[PreTrainedModel] = []

    def sabotaged(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
        listed.append(model)
        if kind == "stale":
            yield from honest(old)
        else:
            yield from ((name, tensor) for name, tensor in honest(model) if "layers.7.mlp.up" not in name)

    with monkeypatch.context() as patch:
        patch.setattr(publish, "named_weights", sabotaged)
        with pytest.raises(
            TrainingStopped, match="1 of 272 tensors were not sent" if kind == "skip" else "stale"
        ):
            trained.publisher.publish(1)
    # After all these faults, a sound publication passes.
    trained.publisher.publish(1)


def test_a_head_that_no_update_ever_packed_anew_is_found_when_the_layout_is_learned(
    engine: VLLMEngine, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last test of an engine: it has the fault from the first publication that it learns from.
    engine._weights_located = False
    monkeypatch.setattr(engine, "__class__", SkipsHead)
    with pytest.raises(ModelError, match="nothing of lm_head, whose packed copy no update renews"):
        trained.publisher.verify_at_start(0)


@quick_engines()
def test_a_prompt_that_is_computed_in_several_steps_gets_the_tokens_of_its_seed(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of four prompts of 12 tokens, a step computes one and a part of the next. The cache holds two responses:
    # the other two wait, and are computed again with what they have. A block has 32 tokens.
    sizes = {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 6}
    engine = VLLMEngine(str(tiny_model_dir), dtype=torch.float32, **{**TINY_ENGINE, "engine_args": sizes})
    scheduler: Any = engine.llm.llm_engine.engine_core.engine_core.scheduler
    preempt, preempted = scheduler._preempt_request, []

    def record(request: Any, *arguments: Any, **options: Any) -> None:
        preempted.append(request.num_output_tokens)
        preempt(request, *arguments, **options)

    monkeypatch.setattr(scheduler, "_preempt_request", record)
    prompts = [list(range(first, first + 12)) for first in (5, 25, 45, 65)]
    seeds = [11, 22, 33, 44]
    together = engine.generate(prompts, Sampling(1, 26, 1.0, seeds))
    assert max(preempted) > 4, "it is computed again in more than one step"
    for prompt, seed, group in zip(prompts, seeds, together, strict=True):
        engine.reset_cache()
        assert engine.generate([prompt], Sampling(1, 26, 1.0, [seed]))[0][0].token_ids == group[0].token_ids
    engine.close()


def test_engines_one_after_the_other_leave_nothing_alive(tiny_model_dir: Path) -> None:
    alive: list[weakref.ref[object]] = []
    hooks = len(convert_frame._bytecode_hooks)
    # The compiled one comes first: the compiler's state is what would stay behind.
    for enforce_eager in (False, True):
        # Dynamo traces, and what it has traced runs as it is: building Inductor's code takes half a minute.
        options = {**TINY_ENGINE["engine_args"], "compilation_config": {"mode": 2, "backend": "eager"}}
        arguments = {**TINY_ENGINE, "engine_args": options, "enforce_eager": enforce_eager}
        engine = VLLMEngine(str(tiny_model_dir), dtype=torch.float32, **arguments)
        # The model has been compiled. Helpers of the sampler would be, too, for 20 s, and know no model.
        engine._eager = True
        # Compiled, and with weights published to it, as in a sweep.
        sent = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
        weights = {name: parameter.detach() for name, parameter in sent.named_parameters()}
        probe = Probe([[5, 6, 7]], 3, {name: tuple(tensor.shape) for name, tensor in weights.items()})
        assert engine.publish(weights.items(), 1, probe).checksums[0].values.keys() == weights.keys()
        model: Any = engine._weights.model
        alive += [weakref.ref(model), weakref.ref(model.model), weakref.ref(model.model.layers[0])]
        alive.append(weakref.ref(model.model.embed_tokens.weight))
        del model
        engine.close()
        assert not [reference for reference in alive if reference() is not None]
        assert len(convert_frame._bytecode_hooks) == hooks
