"""Whole runs in the format that GPUs take by default: nothing stops, and what is resumed is the same run.

The other tests of runs compare numbers to rounding, in float32. Here the numbers of bfloat16 and float16 may
be what they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from async_runs import AsyncRunner, pools, train  # noqa: F401
from tiny_runs import Runner, config, without_eval  # noqa: F401
from tiny_runs import train as train_sync  # noqa: F401

pytestmark = pytest.mark.slow

BFLOAT16: dict[str, Any] = {
    "train_model__autocast": "bf16",
    "inference_model__dtype": "bfloat16",
    "ref_model__dtype": "auto",
}
FLOAT16 = {**BFLOAT16, "train_model__autocast": "fp16", "inference_model__dtype": "float16"}
SETTINGS: dict[str, dict[str, Any]] = {
    "reference": {"policy__kl_coef": 0.1},
    "float32 head": {"train_model__head_dtype": "float32", "inference_model__head_dtype": "float32"},
    "micro-batches": {
        "train__max_tokens_per_microbatch": 400,
        "train__epochs": 2,
        "train__optim_batch_size": 8,
    },
    "no shared prompt": {"train_model__shared_prefix": False},
    "checkpointing": {"train_model__gradient_checkpointing": True},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_in_bfloat16_goes_to_its_end(train_sync: Runner, name: str) -> None:
    lines = train_sync("run", **BFLOAT16, **SETTINGS[name])
    assert lines[-1]["step"] == len(lines) - 1 >= 4
    # The weights of this random model round far more than a trained one's.
    means = [line["publish/logprob_diff_mean"] for line in lines if "publish/logprob_diff_mean" in line]
    assert len(means) >= 4 and all(0 < mean < 1 for mean in means)
    if name == "reference":
        assert lines[1]["kl/reference"] == pytest.approx(0.0, abs=1e-4), "equal weights have no divergence"


@pytest.mark.parametrize("engine", ["float32", "bfloat16"])
def test_a_run_says_that_its_engine_does_not_round_as_its_trainer_does(
    train_sync: Runner, engine: str, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {**BFLOAT16, "inference_model__dtype": engine, "train__total_dialog_turns": 16}
    train_sync("run", **settings)
    printed = " ".join("".join(capfd.readouterr()).split())
    warning = "computes with weights in float32 and the trainer in bfloat16"
    assert (warning in printed) == (engine == "float32")


def test_a_run_in_float16_goes_to_its_end(train_sync: Runner) -> None:
    assert train_sync("run", **FLOAT16)[-1]["step"] == 4


def test_a_run_in_bfloat16_is_resumed_as_if_uninterrupted(
    train_sync: Runner,
    tmp_path: Path,
) -> None:
    settings = {**BFLOAT16, "train__checkpoint_frequency": 1, "checkpoint__keep": 9}
    whole = train_sync("run", **settings)
    assert train_sync("run", resume=str(tmp_path / "run/checkpoints/2"), **BFLOAT16) == whole


@pytest.mark.parametrize("age", [0, 2])
def test_an_asynchronous_run_in_bfloat16_goes_to_its_end(train: AsyncRunner, age: int) -> None:
    lines = train("run", collector__max_policy_age=age, **BFLOAT16)
    assert lines[-1]["step"] == len(lines) - 1 >= 4


def test_adapters_in_bfloat16_train_to_the_end(train_sync: Runner, config: Any) -> None:
    config.train_model.lora.rank = 4
    lines = train_sync("run", **BFLOAT16)
    assert lines[-1]["step"] == 4 and lines[-1]["optimizer/grad_norm"] > 0
