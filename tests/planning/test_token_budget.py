"""Sizes that follow from the memory of a GPU: tokens in a micro-batch, and responses decoded at a time."""

from __future__ import annotations

import pytest
from omegaconf import DictConfig, OmegaConf

from torchrl_grpo.config import Config, parse
from torchrl_grpo.config.checks import validate
from torchrl_grpo.config.parsing import schema_node
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.models.shape import ModelShape
from torchrl_grpo.planning import memory, preflight, token_budget
from torchrl_grpo.planning.planned import Planned
from torchrl_grpo.planning.prediction import GIB
from torchrl_grpo.planning.workload import max_num_seqs
from torchrl_grpo.runtime.hardware import Hardware

HALF_B = ModelShape(494_032_768, 151_936, 896, 24, 4864, 896, 128)
SEVEN_B = ModelShape(7_615_616_512, 152_064, 3584, 28, 18_944, 3584, 512)
SMALL, LARGE = Hardware((23.99,), 64.0, ((8, 9),)), Hardware((79.2,), 200.0, ((9, 0),))


def read(*words: str) -> Config:
    node = OmegaConf.merge(schema_node(), OmegaConf.from_dotlist(list(words)))
    assert isinstance(node, DictConfig)
    return parse(node)


def planned(
    monkeypatch: pytest.MonkeyPatch, there: Hardware, *words: str, shape: ModelShape = HALF_B
) -> Planned:
    monkeypatch.setattr(preflight, "read_shape", lambda model: shape)
    return preflight.make(read(*words), False, there)


def test_the_budget_is_what_the_memory_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ("env.num_envs=64", "train_model.gradient_checkpointing=true")
    small, large = (planned(monkeypatch, there, *overrides).budget for there in (SMALL, LARGE))
    assert 4096 < small.tokens < large.tokens == token_budget.MOST
    assert "80% of a GPU's memory" in small.why and large.why == "more gains nothing"
    # It is the largest: with one step more, the trainer would take more than its share.
    run = planned(monkeypatch, SMALL, *overrides)
    for tokens, fits in ((small.tokens, True), (small.tokens + 4096, False)):
        cfg = token_budget.with_budget(run.cfg, tokens)
        needs = memory.predict(cfg, run.plan, HALF_B, SMALL)
        most = max(needs.need("cuda:0", phase) for phase in ("prepare", "optimize"))
        assert (most <= 0.8 * 23.99 * GIB) == fits


def test_the_default_recipe_is_one_micro_batch_on_80_gb(monkeypatch: pytest.MonkeyPatch) -> None:
    run = planned(monkeypatch, LARGE)
    # 64 responses of 256 tokens, and 8 prompts of 768.
    assert run.budget.tokens >= 64 * 256 + 8 * 768
    assert run.plan.token_budget == run.budget.tokens and run.budget.why == "the whole step at once"
    assert f"micro-batches: at most {run.budget.tokens} tokens (the whole step at once)" in run.peaks()


@pytest.mark.parametrize(
    ("words", "there", "tokens", "why"),
    [
        (["train.max_tokens_per_microbatch=5000"], LARGE, 5000, "as train.max_tokens_per_microbatch says"),
        ([], Hardware((), 64.0), 4096, "the default on a CPU"),
        (["inference_model.max_model_len=6000"], Hardware((), 64.0), 6000, "the default on a CPU"),
        ([], Hardware((None,), 64.0), 4096, "the memory is not predicted"),
    ],
)
def test_a_budget_that_memory_does_not_decide(
    words: list[str], there: Hardware, tokens: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = [] if there.gpus else ["inference_model.backend=transformers"]
    run = planned(monkeypatch, there, *words, *backend)
    assert (run.budget.tokens, run.plan.token_budget) == (tokens, tokens)
    assert why in run.budget.why


def test_a_model_that_does_not_fit_has_the_least_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    run = planned(monkeypatch, LARGE, shape=SEVEN_B)
    assert run.budget.tokens == 4096 and run.budget.why.startswith("the least")
    with pytest.raises(ConfigError, match=r"are needed on cuda:0"):
        preflight.check_memory(run)


def test_a_gpu_decodes_more_responses_than_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned(monkeypatch, LARGE).plan.max_num_seqs == 256
    assert planned(monkeypatch, LARGE, "eval.num_problems=500").plan.max_num_seqs == 500
    assert "engine: at most 256 responses at a time" in planned(monkeypatch, LARGE).peaks()
    # Neither a CPU nor transformers changes.
    for there in (Hardware((), 64.0), LARGE):
        run = planned(monkeypatch, there, "inference_model.backend=transformers")
        assert run.plan.max_num_seqs is None
    assert max_num_seqs(read()) == 64


def test_memory_bounds_the_responses_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("env.num_envs=4", "eval.num_problems=500", "inference_model.gpu_memory_utilization=0.2")
    run = planned(monkeypatch, SMALL, *words)
    room, at_a_time = run.room_for_sequences, run.plan.max_num_seqs
    assert room is not None and at_a_time is not None and 64 < at_a_time == room < 500
    cache = memory.cache_of(HALF_B, 2, room * 1024)
    assert cache < 0.2 * 23.99 * GIB - 2 * HALF_B.parameters
    # A round is never divided for it.
    assert max_num_seqs(read("env.num_envs=100"), on_gpu=True, room=10) == 800
    assert max_num_seqs(read("eval.num_problems=500"), on_gpu=True) == 256


ONE_B = ModelShape(1_235_814_400, 128_256, 2048, 16, 8192, 2048, 512)


@pytest.mark.parametrize(
    ("words", "gib", "expected"),
    [
        ([], 80.0, False),
        # Weights, moments and vLLM's share together are more than the GPU has.
        (["inference_model.gpu_memory_utilization=0.6"], 26.0, True),
        (["inference_model.gpu_memory_utilization=0.6", "inference_model.sleep=false"], 26.0, False),
        (
            ["inference_model.gpu_memory_utilization=0.6", "train_model.offload_optimizer=false"],
            26.0,
            False,
        ),
        (["train_model.offload_optimizer=true"], 80.0, True),
    ],
)
def test_moments_wait_in_host_memory_where_that_decides(
    words: list[str], gib: float, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Hardware((gib,), 64.0, ((9, 0),))
    run = planned(monkeypatch, there, *words, shape=ONE_B)
    assert run.plan.offload_optimizer == expected
    assert ("optimizer: its moments wait in host memory while the engine generates" in run.peaks()) == (
        expected
    )
    assert run.prediction is not None
    held = {row.phase: row.optimizer for row in run.prediction.rows if row.role == "train"}
    assert held["optimize"] == 8 * ONE_B.parameters
    assert held["generate"] == held["prepare"] == (0 if expected else 8 * ONE_B.parameters)


def test_deepspeed_parks_no_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("train_model.parallelism=deepspeed_zero2", "train_model.offload_optimizer=true")
    with pytest.raises(ConfigError, match=r"train_model\.offload_optimizer=true: .*deepspeed_zero2"):
        validate(read(*words))
