"""Whole runs with a judge: an endpoint that fails in every way, and a resumed run with what it had said."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from fake_judge import FakeJudge, Reply, rank_length, score_length
from tiny_runs import Runner, config, train  # noqa: F401  fixtures

from torchrl_grpo.config import Config
from torchrl_grpo.config.values import RewardCombination
from torchrl_grpo.errors import TrainingStopped
from torchrl_grpo.tools.verify_resume import read
from torchrl_grpo.training.job import evaluate

pytestmark = pytest.mark.slow

RUBRIC = {"model": "m", "rubric": "It is long.", "retries": 1, "backoff_s": 0.001, "timeout_s": 2.0}


def with_judge(config: Config, **args: Any) -> None:
    config.reward.weights = {"bare_number": 0.3, "quality": 1.0}
    config.reward.functions = {"quality": "judge"}
    config.reward.args = {"quality": {**RUBRIC, **args}}


def rows_of(folder: Path, name: str = "rollouts.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_a_run_goes_on_with_a_judge_that_fails_in_every_way(
    config: Config,
    train: Runner,
    tmp_path: Path,
) -> None:
    """Each response is judged, or its failure is counted, and the judge then says nothing about it."""

    def answer(request: dict[str, Any], number: int) -> Reply:
        faults = [
            Reply(status=429, headers={"Retry-After": "0"}),
            Reply('{"score": 99}'),
            Reply(status=500),
            Reply(body=b"?"),
            Reply(hangs_up=True),
            Reply(status=403),
        ]
        # By the whole request, so that each attempt has the same fate, and equal responses to two problems
        # may have two.
        fault = sum(json.dumps(request["messages"]).encode()) % 12
        return faults[fault] if fault < len(faults) else score_length(request, number)

    with FakeJudge(answer) as judge:
        with_judge(config, url=judge.url)
        metrics = train("run")
    rows = rows_of(tmp_path / "run")
    assert len(rows) == 64 and [line["step"] for line in metrics][-1] == 4
    failed = [row for row in rows if "errors" in row]
    assert 0 < len(failed) < 64
    assert all(("errors" in row) != ("verdicts" in row) for row in rows)
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["group_id"], []).append(row)
    for group in groups.values():
        judged = [row["rewards"]["quality"] for row in group if "verdicts" in row]
        for row in group:
            if "errors" in row:
                mean = pytest.approx(sum(judged) / len(judged)) if judged else None
                assert row["rewards"].get("quality") == mean
            total = 0.3 * row["rewards"]["bare_number"] + row["rewards"].get("quality", 0.0)
            assert row["reward"] == pytest.approx(total)
    by_step = {line["step"]: line for line in metrics if "reward/errors" in line}
    for step, line in by_step.items():
        of_step = [row for row in rows if row["step"] == step]
        assert line["reward/errors"] == sum("errors" in row for row in of_step)
        judged = [row["rewards"]["quality"] for row in of_step if "quality" in row["rewards"]]
        assert line["reward/quality"] == pytest.approx(sum(judged) / len(judged))
    held_out = rows_of(tmp_path / "run", "evaluations.jsonl")
    last = [row for row in held_out if row["step"] == 4]
    graded = [row["grade"] for row in last if "grade" in row]
    assert all(("grade" in row) == ("verdicts" in row) for row in last) and graded
    assert metrics[-1]["eval/primary"] == pytest.approx(sum(graded) / len(graded))
    assert metrics[-1]["eval/errors"] == len(last) - len(graded)


def test_a_run_goes_on_when_its_judge_is_gone(config: Config, train: Runner, tmp_path: Path) -> None:
    """The judge answers the first evaluation and round only. What else there is to learn is learned then.

    Each reward has advantages of its own here, and one that is missing has none.
    """
    config.policy.reward_combination = RewardCombination.apart
    problems: list[str] = []

    def answer(request: dict[str, Any], number: int) -> Reply:
        problem = request["messages"][-1]["content"].partition("user: ")[2].partition("\n")[0]
        if problem not in problems:
            problems.append(problem)
        return score_length(request, number) if len(problems) <= 6 + 4 else Reply(hangs_up=True)

    with FakeJudge(answer) as judge:
        with_judge(config, url=judge.url, cache=None)
        metrics = train("run", train__total_dialog_turns=32)
    later = rows_of(tmp_path / "run")[16:]
    assert [line.get("reward/errors") for line in metrics] == [None, 0, 16]
    assert "reward/quality" in metrics[1] and "reward/quality" not in metrics[2]
    assert metrics[2]["reward/error_share"] == 1.0
    assert "eval/primary" in metrics[0] and metrics[2]["eval/errors"] == 6
    assert not {"eval/primary", "eval/accuracy"} & metrics[2].keys(), "nothing was graded"
    assert (tmp_path / "run/summary.json").is_file()
    assert all("cannot be reached" in row["errors"]["quality"] for row in later)
    assert all(row["reward"] == pytest.approx(0.3 * row["rewards"]["bare_number"]) for row in later)
    assert all(math.isfinite(row["advantage"]) for row in later) and any(row["advantage"] for row in later)


def test_an_evaluation_without_any_grade_is_an_error(config: Config) -> None:
    with FakeJudge(lambda request, number: Reply(status=404, body=b"no such model")) as judge:
        with_judge(config, url=judge.url)
        with pytest.raises(
            TrainingStopped, match=r"no held-out response has a grade.* answered 404: no such model"
        ):
            evaluate(config, None)


@pytest.mark.parametrize("mode", ["absolute", "ranking"])
def test_a_resumed_run_has_the_verdicts_of_the_run_that_ended(
    config: Config,
    train: Runner,
    tmp_path: Path,
    mode: str,
) -> None:
    """The judge that answers the resumed run says something else each time, and is not asked."""
    with FakeJudge({"absolute": score_length, "ranking": rank_length}[mode]) as judge:
        with_judge(config, url=judge.url, mode=mode)
        config.eval.reward = "bare_number" if mode == "ranking" else None
        whole = train("whole", train__total_dialog_turns=32, train__checkpoint_frequency=1)
    rollouts = read(tmp_path / "whole/rollouts.jsonl")
    assert all("verdicts" in row for row in rollouts)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    with FakeJudge(lambda request, number: Reply(status=400)) as other:
        config.reward.args["quality"] |= {"url": other.url, "concurrency": 3}
        assert train("cut", resume=str(tmp_path / "cut/checkpoints/1")) == whole
        assert not other.requests
    assert read(tmp_path / "cut/rollouts.jsonl") == rollouts
