"""Whole runs on a mixture of data sets: its metrics, its resumption, and the same with workers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from async_runs import AsyncRunner, pools  # noqa: F401  fixtures
from async_runs import train as train_async  # noqa: F401
from tiny_runs import Runner, config, train  # noqa: F401  fixtures

from torchrl_grpo.config import Config
from torchrl_grpo.config.values import ProblemSampling
from torchrl_grpo.tools.verify_resume import read

pytestmark = pytest.mark.slow


@pytest.fixture
def mixture(config: Config) -> Config:
    """Sums from the file, and sums that are generated, with other rewards."""
    path, config.env.data_path = config.env.data_path, None
    config.reward.weights = {}
    config.env.mixture = [
        {
            "name": "file",
            "dataset": "jsonl",
            "data_path": path,
            "weight": 3,
            "reward": {"weights": {"exact_match": 1.0, "bare_number": 0.3}},
        },
        {
            "dataset": "reasoning_gym",
            "task": "chain_sum",
            "task_size": 30,
            "reward": {"weights": {"reasoning_gym": 1.0, "bare_number": 0.5}},
        },
    ]
    return config


def test_a_mixture_trains_is_measured_by_part_and_resumes(
    mixture: Config,
    train: Runner,
    train_async: AsyncRunner,
    tmp_path: Path,
) -> None:
    whole = train("whole", train__checkpoint_frequency=3, checkpoint__keep=9)
    rows = read(tmp_path / "whole/rollouts.jsonl")
    groups: dict[int, set[str]] = {}
    for row in rows:
        groups.setdefault(row["group_id"], set()).update(name.partition("/")[0] for name in row["rewards"])
    assert all(len(parts) == 1 for parts in groups.values()), "a group has one problem"
    counts = Counter(part for parts in groups.values() for part in parts)
    assert counts["file"] > counts["chain_sum"] > 0
    for row in rows:
        weight = 0.3 if "file/bare_number" in row["rewards"] else 0.5
        (bonus,) = (value for name, value in row["rewards"].items() if name.endswith("bare_number"))
        (right,) = (value for name, value in row["rewards"].items() if "bare_number" not in name)
        assert row["reward"] == pytest.approx(right + weight * bonus)
    names = {"eval/accuracy", "eval/file/accuracy", "eval/chain_sum/accuracy"}
    assert names <= whole[0].keys() and whole[0]["eval/num_problems"] == 12
    assert any("reward/file/exact_match" in line for line in whole)
    assert (
        train("whole", resume=str(tmp_path / "whole/checkpoints/3"), train__checkpoint_frequency=0) == whole
    )
    assert read(tmp_path / "whole/rollouts.jsonl") == rows
    mixture.resume = None
    apart = train_async("async", collector__max_policy_age=0)
    assert [{name: line[name] for name in other} for line, other in zip(apart, whole, strict=True)] == whole


def test_a_curriculum_resumes_and_is_the_same_with_workers(
    config: Config, train: Runner, train_async: AsyncRunner, tmp_path: Path
) -> None:
    config.env.sampling = ProblemSampling.pass_rate
    config.env.pass_rate_weights = [1.0, 2.0, 0.0]
    # Half of the responses of this model are right by this measure.
    config.reward.weights = {"bare_number": 2.0}
    whole = train("whole", train__checkpoint_frequency=2, checkpoint__keep=9)
    rows = read(tmp_path / "whole/rollouts.jsonl")
    assert 0 < whole[1]["data/seen"] < whole[-1]["data/seen"] < 1
    assert any(0 < line["data/pass_rate"] < 1 for line in whole[1:])
    assert (
        train("whole", resume=str(tmp_path / "whole/checkpoints/2"), train__checkpoint_frequency=0) == whole
    )
    assert read(tmp_path / "whole/rollouts.jsonl") == rows
    config.resume = None
    apart = train_async("async", collector__max_policy_age=0)
    assert [{name: line[name] for name in other} for line, other in zip(apart, whole, strict=True)] == whole
