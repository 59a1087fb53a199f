"""The history of each held-out problem: its grade in each evaluation, its first and its newest response."""

from __future__ import annotations

import math
from array import array
from typing import Any

from torchrl_grpo.observe.metrics import jsonable
from torchrl_grpo.report.columns import number
from torchrl_grpo.report.pictures import names_of
from torchrl_grpo.report.texts import problem_id, shorten

MOST_PROBLEMS = 20_000


class HeldOutHistory:
    """Grades by problem and evaluation.

    Args:
        budget: number of characters of responses and prompts to keep.

    Attributes:
        lost: whether a problem or a text was left out.
    """

    def __init__(self, budget: int) -> None:
        self.lost = False
        self._budget = budget
        self._steps: list[int] = []
        self._problems: dict[str, int] = {}
        # For each evaluation: sum and number of the grades of each problem.
        self._sums: list[array[float]] = []
        self._counts: list[array[int]] = []
        # Problems of the newest evaluation.
        self._seen: set[int] = set()
        self._texts: dict[int, dict[str, Any]] = {}
        self._size = 0

    def take(self, row: dict[str, Any]) -> None:
        """Add a line of ``evaluations.jsonl``."""
        step, id = row["step"], problem_id(row)
        if id not in self._problems and len(self._problems) >= MOST_PROBLEMS:
            self.lost = True
            return
        problem = self._problems.setdefault(id, len(self._problems))
        if not self._steps or self._steps[-1] != step:
            self._steps.append(step)
            self._sums.append(array("f"))
            self._counts.append(array("i"))
            self._seen.clear()
        sums, counts = self._sums[-1], self._counts[-1]
        while len(sums) <= problem:
            sums.append(0.0)
            counts.append(0)
        grade = number(row.get("grade"))
        # A response that a judge gave no verdict on has none, and is left out of the metrics too.
        if not math.isnan(grade):
            sums[problem] += grade
            counts[problem] += 1
        if problem not in self._seen:
            self._seen.add(problem)
            self._take_text(problem, id, step, row)

    def _take_text(self, problem: int, id: str, step: int, row: dict[str, Any]) -> None:
        response = shorten(str(row.get("response", "")))
        text = {"step": step, "response": response, "grade": jsonable(number(row.get("grade")))}
        texts = self._texts.get(problem)
        if texts is None:
            prompt = shorten(str(row.get("prompt", "")))
            if self._size + len(prompt) + 2 * len(response) > self._budget:
                self.lost = True
                return
            self._texts[problem] = {"id": id, "prompt": prompt, "first": text, "last": text}
            if pictures := names_of(row.get("pictures")):
                self._texts[problem]["pictures"] = pictures
            self._size += len(prompt) + 2 * len(response)
            return
        previous: str = texts["last"]["response"]
        if self._size + len(response) - len(previous) > self._budget:
            self.lost = True
            return
        self._size += len(response) - len(previous)
        texts["last"] = text

    def contents(self) -> dict[str, Any]:
        """Return ids, steps, and the grades of each evaluation as one array."""
        width = len(self._problems)
        grades = array("f", [math.nan]) * (width * len(self._steps))
        for evaluation, (sums, counts) in enumerate(zip(self._sums, self._counts, strict=True)):
            for problem, count in enumerate(counts):
                if count:
                    grades[evaluation * width + problem] = sums[problem] / count
        return {
            "ids": list(self._problems),
            "steps": self._steps,
            "grades": grades,
            "lost": self.lost,
        }

    def texts(self) -> list[dict[str, Any] | None]:
        """Return prompt, first and newest response of each problem; None for one beyond the bound."""
        return [self._texts.get(problem) for problem in range(len(self._problems))]
