"""The two ways of DeepSpeed's to hold the model: numbers of one process, checkpoints, launching."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from forked import run_script
from rank_program import CASES, RELOADED
from rank_runs import (
    Runs,
    check_kept_and_loaded,
    check_same_numbers,
    check_same_state,
    in_ranks,
    measured_alone,
    one_rank,  # noqa: F401
    runs,  # noqa: F401
    sums,  # noqa: F401
)

from torchrl_grpo.config import Config
from torchrl_grpo.config.checks import whole as checks
from torchrl_grpo.config.values import ZERO_STAGES, Parallelism
from torchrl_grpo.distributed.deepspeed import engine_config
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.planning import resolve

pytestmark = pytest.mark.slow

KINDS = tuple(ZERO_STAGES)
installed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="the package deepspeed is not installed (requirements_dev.txt)",
)


@pytest.fixture(scope="module")
def in_three_ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What three ranks measure. Each rank also asserts what ``zero_program.py`` checks by itself."""
    return in_ranks(3, tmp_path_factory.mktemp("ranks") / "found.pt", KINDS, "zero_program.py")


@installed
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_ranks_compute_what_one_process_does(in_three_ranks: Any, case: str, kind: str) -> None:
    check_same_numbers(in_three_ranks[case, kind], case)


@installed
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_the_optimizer_s_state_is_the_same_for_all_layouts(in_three_ranks: Any, case: str, kind: str) -> None:
    check_same_state(in_three_ranks[case, kind]["state"], measured_alone(case)["state"])


@installed
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", RELOADED)
def test_moments_are_kept_by_the_rank_that_saves_them_and_loaded_in_parts(
    in_three_ranks: Any, case: str, kind: str
) -> None:
    check_kept_and_loaded(in_three_ranks[case, kind], 3)


# The ranks above have computed all numbers in both ways. These runs show each way and each launcher once.
@installed
def test_a_run_follows_the_run_on_one_rank_and_so_does_its_continuation_there(
    runs: Runs, tmp_path: Path
) -> None:
    done = runs.start_forks(tmp_path / "run", "deepspeed_zero3")
    assert "FutureWarning" not in done.stderr
    runs.go_on(tmp_path / "run")


@installed
def test_a_run_on_one_rank_continues_on_two(runs: Runs, tmp_path: Path) -> None:
    more = ("train_model.num_devices=2", "train_model.parallelism=deepspeed_zero2")
    runs.take_over(tmp_path / "run", *more, ranks=2)


@pytest.mark.parametrize("kind", KINDS)
def test_files_for_the_launcher_are_what_it_reads(kind: str, repo_root: Path) -> None:
    launcher_config = load_config_from_file(str(repo_root / f"config/accelerate/{kind}.yaml"))
    assert launcher_config.distributed_type.name == "DEEPSPEED"
    assert launcher_config.deepspeed_config == {"zero_stage": ZERO_STAGES[kind]}
    assert launcher_config.mixed_precision == "no", "train_model.autocast chooses the numbers"


_PARSE = """
import json, sys
from deepspeed.runtime.config import DeepSpeedConfig
for told in sys.argv[1:]:
    found = DeepSpeedConfig(json.loads(told))
    zero = found.zero_config
    print(json.dumps([int(zero.stage), found.gradient_clipping, found.gradient_accumulation_steps,
                      found.bfloat16_config.enabled, found.float16_config.enabled,
                      zero.param_persistence_threshold, zero.max_reuse_distance]))
"""


@installed
def test_deepspeed_reads_what_it_is_told(tmp_path: Path) -> None:
    configs = [json.dumps(engine_config(ZERO_STAGES[kind], 0.5, 96)) for kind in KINDS]
    (tmp_path / "parse.py").write_text(_PARSE)
    done = run_script([tmp_path / "parse.py", *configs], variables={"DS_ACCELERATOR": "cpu"})
    assert done.returncode == 0, done.stderr
    for kind, line in zip(KINDS, done.stdout.splitlines()[-2:], strict=True):
        stage, clipping, accumulation, bf16, fp16, stay, reuse = json.loads(line)
        assert (stage, clipping, accumulation) == (ZERO_STAGES[kind], 0.5, 1)
        assert not bf16 and not fp16
        if stage == 3:
            assert (stay, reuse) == (96, 0)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = Config()
    cfg.inference_model.backend = "transformers"
    cfg.train_model.parallelism = Parallelism("deepspeed_zero2")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"deepspeed_zero2: deepspeed is not installed"):
        checks.check_installed(cfg)


@pytest.mark.parametrize(
    ("stage", "parallelism", "kind"),
    [
        ("2", "auto", "deepspeed_zero2"),
        ("3", "auto", "deepspeed_zero3"),
        ("3", "deepspeed_zero3", "deepspeed_zero3"),
        (None, "deepspeed_zero3", "deepspeed_zero3"),
        (None, "auto", "ddp"),
    ],
)
def test_the_launcher_s_stage_is_taken(
    stage: str | None, parallelism: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _as_told(monkeypatch, stage)
    cfg = Config()
    cfg.train_model.parallelism = Parallelism(parallelism)
    assert resolve.parallelism(cfg) == kind


def _as_told(monkeypatch: pytest.MonkeyPatch, stage: str | None) -> None:
    if stage is not None:
        monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", stage)


@pytest.mark.parametrize(
    ("stage", "values", "message"),
    [
        (
            "1",
            {},
            "zero_stage 1, and only 2 and 3 are run; write --config_file config/accelerate/deepspeed_zero2",
        ),
        ("2", {"parallelism": "ddp"}, "configured for DeepSpeed ZeRO-2.*accelerate/multi_gpu.yaml"),
        ("2", {"parallelism": "fsdp2"}, "configured for DeepSpeed ZeRO-2.*accelerate/fsdp2.yaml"),
        ("2", {"parallelism": "deepspeed_zero3"}, "configured for DeepSpeed ZeRO-2.*deepspeed_zero3.yaml"),
        ("3", {"autocast": "fp16"}, "train_model.autocast=fp16: .*write train_model.autocast=bf16"),
        (None, {"parallelism": "deepspeed_zero2", "autocast": "fp16"}, "write train_model.autocast=bf16"),
    ],
)
def test_contradictions_are_told(
    stage: str | None, values: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _as_told(monkeypatch, stage)
    cfg = Config()
    for name, value in values.items():
        setattr(cfg.train_model, name, value)
    with pytest.raises(ConfigError, match=message):
        resolve.parallelism(cfg)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_refused(kind: str) -> None:
    cfg = Config()
    cfg.train_model.parallelism = Parallelism(kind)
    cfg.train_model.lora.rank = 4
    with pytest.raises(ConfigError, match=r"adapters are merged.*write train_model.parallelism=ddp"):
        resolve.parallelism(cfg)


def test_one_rank_needs_no_engine() -> None:
    from batches import make_model

    from torchrl_grpo.distributed.parallelism import distribute
    from torchrl_grpo.models.scoring.token_scorer import TokenScorer

    scorer = TokenScorer(make_model("llama"))
    assert distribute(scorer, "deepspeed_zero3", 1, torch.device("cpu")) is scorer
