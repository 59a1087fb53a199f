"""Grades of a single completion."""

from __future__ import annotations

from torchrl_grpo.data.example import Example
from torchrl_grpo.rewards.graders import CountingGrader


def grades(grader: CountingGrader, completion: str, example: Example) -> dict[str, float]:
    """Return the metrics of one completion."""
    (graded,) = grader.grade([completion], [example])
    return graded.metrics
