"""Two workers, turn by turn: A B A B, and the ratio of each pair."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from benchmarks.protocol import Worker
from benchmarks.workload import Workload


@dataclass
class Spread:
    """Smallest, middle and largest of some numbers."""

    low: float
    median: float
    high: float

    @staticmethod
    def of(values: list[float]) -> Spread:
        """Of at least one."""
        return Spread(min(values), statistics.median(values), max(values))

    def show(self, form: str = ".2f") -> str:
        """As ``middle (smallest to largest)``."""
        return f"{self.median:{form}} ({self.low:{form}} to {self.high:{form}})"


@dataclass
class Comparison:
    """Steps of two libraries on the same work, in turn.

    Attributes:
        names: of the two, ours first.
        ours: what each of our steps reported.
        theirs: likewise, step by step beside it.
    """

    names: tuple[str, str]
    ours: list[dict[str, Any]] = field(default_factory=list)
    theirs: list[dict[str, Any]] = field(default_factory=list)

    def ratio(self, key: str = "seconds") -> Spread:
        """How many times longer they take, pair by pair."""
        pairs = zip(self.ours, self.theirs, strict=True)
        return Spread.of([theirs[key] / ours[key] for ours, theirs in pairs])

    def of(self, side: str, key: str) -> Spread:
        """What one ``side``, ours or theirs, reported."""
        return Spread.of([step[key] for step in getattr(self, side)])


def compare(
    ours: tuple[str, Workload],
    theirs: tuple[str, Workload],
    pairs: int,
    warm_up: int,
    say: Callable[[str], None],
) -> Iterator[Comparison]:
    """Run two workers side by side; what was found so far, after every measured pair.

    Args:
        ours: module in :mod:`benchmarks.workers` and what it is given.
        theirs: likewise.
        pairs: that are measured.
        warm_up: pairs before, thrown away.
        say: told of every step.

    Raises:
        RuntimeError: a worker ended, or the two were not given prompts of the same length.
    """
    found = Comparison((ours[0], theirs[0]))
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(*which)) for which in (ours, theirs)]
        for number in range(-warm_up, pairs):
            lengths = []
            for worker, steps in zip(workers, (found.ours, found.theirs), strict=True):
                answer = worker.step()
                phases = ", ".join(f"{k} {v:.2f}" for k, v in answer.items() if k in ("generate", "train"))
                label = "warm-up" if number < 0 else f"pair {number + 1} of {pairs}"
                say(f"  {label}: {worker.name} {answer['seconds']:.2f} s ({phases})")
                lengths.append(answer.get("prompt_tokens"))
                if number >= 0:
                    steps.append(answer)
            if lengths[0] != lengths[1]:
                said = " and ".join(f"{worker.name} {n}" for worker, n in zip(workers, lengths, strict=True))
                raise RuntimeError(f"the two sides had prompts of different lengths: {said} tokens")
            if number >= 0:
                yield found
