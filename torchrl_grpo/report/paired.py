"""Results of two runs on the same held-out problems, paired by problem.

:mod:`torchrl_grpo.report.differences` decides which evaluations and which problems can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchrl_grpo.observe.metrics import EVALUATIONS
from torchrl_grpo.observe.stats import paired_interval
from torchrl_grpo.report.columns import MOST_PARTS, number
from torchrl_grpo.report.held_out import MOST_PROBLEMS
from torchrl_grpo.report.lines import GrowingFile
from torchrl_grpo.report.texts import problem_id, problem_name, shorten

# Names of what the grader gave, and of the weighted sum of rewards. Other names are those of rewards.
Name = tuple[str, ...]
GRADE: Name = ("grade",)
SUM: Name = ("sum",)


@dataclass
class Answers:
    """The responses of a run to a problem in an evaluation.

    Attributes:
        prompt: hash of the prompt.
        problem: the problem, if other questions word it too and the row says so.
        samples: number of responses.
        tokens: number of tokens that the loss of a solution is the mean of, and 1 for other grades.
        sums: sums of the grades and rewards by name.
        counts: numbers of values in ``sums``.
    """

    prompt: int
    problem: str | None
    samples: int = 0
    tokens: float = 1.0
    sums: dict[Name, float] = field(default_factory=dict)
    counts: dict[Name, int] = field(default_factory=dict)

    def take(self, row: Mapping[str, Any]) -> None:
        """Add a line of ``evaluations.jsonl``."""
        self.samples += 1
        tokens = number(row.get("tokens"))
        self.tokens = tokens if tokens > 0 else 1.0
        rewards = row.get("rewards")
        parts = rewards if isinstance(rewards, dict) else {}
        values = {GRADE: row.get("grade"), SUM: row.get("reward")}
        values.update({("reward", name): value for name, value in list(parts.items())[:MOST_PARTS]})
        for name, value in values.items():
            if not math.isnan(finite := number(value)):
                self.sums[name] = self.sums.get(name, 0.0) + finite
                self.counts[name] = self.counts.get(name, 0) + 1

    def mean(self, name: Name) -> float:
        """Return the mean over the responses that have a value."""
        return self.sums[name] / self.counts[name]


@dataclass(frozen=True)
class Difference:
    """Means of two runs over the same problems, and the difference, second minus first.

    Attributes:
        first: mean of the first run.
        second: mean of the second run.
        difference: difference of the means.
        low: lower end of its paired 95 % interval.
        high: upper end of the interval.
        problems: number of problems.
    """

    first: float
    second: float
    difference: float
    low: float
    high: float
    problems: int


def read_answers(run_dir: Path, step: int) -> dict[str, Answers]:
    """Return the answers to each problem in the evaluation at a step.

    Problems beyond a bound are left out.

    Raises:
        OSError: the file cannot be read.
    """
    answers: dict[str, Answers] = {}
    for row in _rows(run_dir, step):
        id = problem_id(row)
        if id in answers or len(answers) < MOST_PROBLEMS:
            answers.setdefault(id, Answers(hash(str(row.get("prompt", ""))), problem_name(row))).take(row)
    return answers


def read_responses(run_dir: Path, step: int, ids: Collection[str], budget: int) -> dict[str, dict[str, str]]:
    """Return prompt and first response to each of some problems at a step, as far as the budget goes.

    Raises:
        OSError: the file cannot be read.
    """
    texts: dict[str, dict[str, str]] = {}
    left = budget
    for row in _rows(run_dir, step):
        if (id := problem_id(row)) not in ids or id in texts:
            continue
        text = {name: shorten(str(row.get(name, ""))) for name in ("prompt", "response")}
        left -= sum(map(len, text.values()))
        if left < 0:
            break
        texts[id] = text
    return texts


def _rows(run_dir: Path, step: int) -> Iterator[dict[str, Any]]:
    rows = GrowingFile(run_dir / EVALUATIONS).new_lines(skip_falls=True)
    return (row for row in rows if row["step"] == step)


def shared_problems(
    first: Mapping[str, Answers], second: Mapping[str, Answers]
) -> tuple[Sequence[str], Sequence[str]]:
    """Return the problems that both runs have with the same prompt, and with another one."""
    same: list[str] = []
    other: list[str] = []
    for id, answers in first.items():
        if id in second:
            (same if answers.prompt == second[id].prompt else other).append(id)
    return same, other


def differences(
    first: Mapping[str, Answers],
    second: Mapping[str, Answers],
    ids: Sequence[str],
    without: Collection[Name] = (),
) -> dict[Name, Difference]:
    """Compare each grade and reward that both runs have, on the problems for which both have it.

    The reward that is the grade by another name is left out.

    Args:
        first: answers of the first run.
        second: answers of the second run.
        ids: problems to compare.
        without: what does not mean the same in both, and is not compared.
    """
    names = dict.fromkeys(name for id in ids for name in first[id].sums if name in second[id].sums)
    results: dict[Name, Difference] = {}
    grades: list[tuple[float, float]] | None = None
    for name in list(names)[: MOST_PARTS + 2]:
        if name in without:
            continue
        shared = [id for id in ids if name in first[id].sums and name in second[id].sums]
        both = [(second[id], first[id]) for id in shared]
        # Rows of an older version do not name problems.
        problems = [
            later.problem or base.problem or id for id, (later, base) in zip(shared, both, strict=True)
        ]
        pairs = [(later.mean(name), base.mean(name)) for later, base in both]
        if name == GRADE:
            grades = pairs
        elif pairs == grades and name != SUM:
            # One at most, as others may be equal by chance.
            grades = None
            continue
        weights = [(later.tokens, base.tokens) for later, base in both] if name == GRADE else []
        mean, (low, high) = paired_interval(pairs, weights, problems)
        results[name] = Difference(
            _mean([pair[1] for pair in pairs], [weight[1] for weight in weights]),
            _mean([pair[0] for pair in pairs], [weight[0] for weight in weights]),
            mean,
            low,
            high,
            len(pairs),
        )
    return results


def changed(
    first: Mapping[str, Answers], second: Mapping[str, Answers], ids: Sequence[str]
) -> dict[str, tuple[float, float]]:
    """Return the problems whose grades differ, with the grade of each run; the largest difference first."""
    graded = [id for id in ids if GRADE in first[id].sums and GRADE in second[id].sums]
    grades = {id: (first[id].mean(GRADE), second[id].mean(GRADE)) for id in graded}
    order = sorted(graded, key=lambda id: -abs(grades[id][1] - grades[id][0]))
    return {id: grades[id] for id in order if grades[id][0] != grades[id][1]}


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    if not weights:
        return sum(values) / len(values)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
