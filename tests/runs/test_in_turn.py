"""grpo.py with workers for engines: the run that it is with one engine in its own process, line by line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from local_pool import LocalPool, collect_locally
from tiny_runs import Runner, config, train  # noqa: F401  fixtures

from torchrl_grpo.errors import CheckpointError, WorkersLost
from torchrl_grpo.rollout import build
from torchrl_grpo.tools.verify_resume import read, unmeasured
from torchrl_grpo.training.job import run_async

pytestmark = pytest.mark.slow


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[LocalPool]:
    """Workers are threads; what was started."""
    created: list[LocalPool] = []
    monkeypatch.setattr(build, "collector_with_ray_workers", collect_locally(created))
    return created


def comparable(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in unmeasured(line).items() if not key.startswith("workers/")}
        for line in lines
    ]


def sampled(folder: Path) -> list[str]:
    return [row["response"] for row in read(folder / "rollouts.jsonl")]


# With an address of a cluster engines are workers; here they are threads all the same.
ONE_WORKER: dict[str, Any] = {"ray__address": "auto"}
ONE_ENGINE: dict[str, Any] = {"ray__address": None}
SETTINGS = [
    {},
    {"train__optim_batch_size": 8, "train__epochs": 2, "train__total_dialog_turns": 32},
    {"policy__constant_groups": "refill", "policy__max_refills": 9},
    {"policy__kl_coef": 0.1, "eval__pass_at_k": 2},
]
NAMES = ["plain", "several steps a round", "refilled", "reference"]


@pytest.mark.parametrize("settings", SETTINGS, ids=NAMES)
def test_workers_in_turn_are_one_engine_line_by_line_also_when_one_continues_the_other(
    train: Runner, tmp_path: Path, pools: list[LocalPool], settings: dict[str, Any]
) -> None:
    # The resumed runs write no checkpoint at the steps of these, so one that changed its run would be seen.
    alone = train("one", train__checkpoint_frequency=2, checkpoint__keep=99, **settings)
    assert not pools
    other = train("worker", **ONE_WORKER)
    assert pools[-1].calls and pools[-1].closed
    assert comparable(other) == comparable(alone)
    assert sampled(tmp_path / "worker") == sampled(tmp_path / "one")
    for name, engine in (("one", ONE_WORKER), ("worker", ONE_ENGINE)):
        kept = str(tmp_path / name / "checkpoints/2")
        resumed = train(name, resume=kept, train__checkpoint_frequency=0, **engine)
        assert comparable(resumed) == comparable(alone)
        assert json.loads((tmp_path / name / "summary.json").read_text())["steps"] == len(alone) - 1
    assert len(pools) == 2


@pytest.mark.float32
def test_two_workers_in_turn_sample_what_one_engine_samples(
    train: Runner, tmp_path: Path, pools: list[LocalPool]
) -> None:
    alone = train("one")
    # Rounding depends on the batch, and theirs are smaller.
    two = train("two", inference_model__num_devices=2)
    assert sampled(tmp_path / "two") == sampled(tmp_path / "one")
    assert [line["loss/total"] for line in two[1:]] == pytest.approx(
        [line["loss/total"] for line in alone[1:]], abs=1e-4
    )


def test_a_run_that_ran_ahead_does_not_go_on_in_turn(
    train: Runner, config: Any, tmp_path: Path, pools: list[LocalPool]
) -> None:
    config.collector.max_policy_age, config.train.checkpoint_frequency, config.checkpoint.keep = 1, 2, 99
    config.policy.proximal = "engine"
    config.train.total_dialog_turns = 48
    run_async(config, tmp_path / "run")
    for settings in ({}, ONE_WORKER):
        with pytest.raises(CheckpointError, match=r"grpo-async\.py"):
            train("run", resume=str(tmp_path / "run/checkpoints/2"), **settings)


def test_a_run_that_was_in_turn_does_not_begin_to_run_ahead(
    train: Runner, config: Any, tmp_path: Path, pools: list[LocalPool]
) -> None:
    config.policy.proximal = "engine"
    turns: dict[str, Any] = {"train__total_dialog_turns": 32}
    train("run", train__checkpoint_frequency=1, checkpoint__keep=99, **turns, **ONE_WORKER)
    config.resume, config.collector.max_policy_age = str(tmp_path / "run/checkpoints/1"), 1
    with pytest.raises(CheckpointError, match=r"started with grpo\.py"):
        run_async(config, tmp_path / "run")


@pytest.mark.float32
def test_what_dead_workers_had_begun_is_begun_anew_by_one_engine(
    train: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train("whole", eval__num_problems=0)
    worked: list[int] = []

    def dies(number: int, method: str, count: int) -> None:
        if method == "work" and number == 1:
            worked.append(count)
            if len(worked) > 1:
                # The other worker's share of the round is there by then, or is not.
                raise RuntimeError("device lost")

    monkeypatch.setattr(build, "collector_with_ray_workers", collect_locally([], fault=dies))
    # Workers that continue a run die in its next round.
    for last, resume in ((1, None), (2, "auto"), (3, "auto")):
        worked.clear()
        with pytest.raises(WorkersLost, match="device lost"):
            train("run", resume=resume, collector__max_restarts=0, inference_model__num_devices=2)
        steps = sorted(int(path.name) for path in (tmp_path / "run/checkpoints").iterdir())
        assert steps[-1] == last
        if last == 1:
            shutil.copytree(tmp_path / "run", tmp_path / "early")
    train("run", resume="auto", inference_model__num_devices=1)
    assert sampled(tmp_path / "run") == sampled(tmp_path / "whole")
    train("early", resume="auto", inference_model__num_devices=1)
    assert sampled(tmp_path / "early") == sampled(tmp_path / "whole")
