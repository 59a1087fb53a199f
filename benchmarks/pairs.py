"""Run two workers in turn (A B A B) and compute the ratio of each pair."""

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
    """Smallest number, median and largest number of a list."""

    low: float
    median: float
    high: float

    @staticmethod
    def of(values: list[float]) -> Spread:
        """Compute the spread of at least one number."""
        return Spread(min(values), statistics.median(values), max(values))

    def show(self, spec: str = ".2f") -> str:
        """Format as ``median (smallest to largest)``, each number with the format ``spec``."""
        return f"{self.median:{spec}} ({self.low:{spec}} to {self.high:{spec}})"


@dataclass
class Comparison:
    """Steps of two libraries on the same workload, in turn.

    Attributes:
        names: names of the two workers, ours first.
        ours: reports of our steps.
        theirs: reports of the other library's steps, in the same order.
    """

    names: tuple[str, str]
    ours: list[dict[str, Any]] = field(default_factory=list)
    theirs: list[dict[str, Any]] = field(default_factory=list)

    def ratio(self, key: str = "seconds") -> Spread:
        """Return the spread of their time divided by ours, pair by pair."""
        pairs = zip(self.ours, self.theirs, strict=True)
        return Spread.of([theirs[key] / ours[key] for ours, theirs in pairs])

    def of(self, side: str, key: str) -> Spread:
        """Return the spread of ``key`` in the reports of ``side``, which is ``ours`` or ``theirs``."""
        return Spread.of([step[key] for step in getattr(self, side)])


def compare(
    ours: tuple[str, Workload],
    theirs: tuple[str, Workload],
    pairs: int,
    warm_up: int,
    notify: Callable[[str], None],
) -> Iterator[Comparison]:
    """Run two workers in turn, and yield the results so far after every measured pair.

    Args:
        ours: name of our module in :mod:`benchmarks.workers`, and its workload.
        theirs: name of the other module in :mod:`benchmarks.workers`, and its workload.
        pairs: number of measured pairs.
        warm_up: number of warm-up pairs, which are discarded.
        notify: function that receives a message after every step.

    Raises:
        RuntimeError: a worker exited, or the two sides had prompts of different lengths.
    """
    comparison = Comparison((ours[0], theirs[0]))
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(*which)) for which in (ours, theirs)]
        for number in range(-warm_up, pairs):
            lengths = []
            for worker, steps in zip(workers, (comparison.ours, comparison.theirs), strict=True):
                answer = worker.step()
                phases = ", ".join(f"{k} {v:.2f}" for k, v in answer.items() if k in ("generate", "train"))
                label = "warm-up" if number < 0 else f"pair {number + 1} of {pairs}"
                notify(f"  {label}: {worker.name} {answer['seconds']:.2f} s ({phases})")
                lengths.append(answer.get("prompt_tokens"))
                if number >= 0:
                    steps.append(answer)
            if lengths[0] != lengths[1]:
                both = " and ".join(f"{worker.name} {n}" for worker, n in zip(workers, lengths, strict=True))
                raise RuntimeError(f"the two sides had prompts of different lengths: {both} tokens")
            if number >= 0:
                yield comparison
