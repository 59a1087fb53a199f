"""A part of the control plane, its measurement at several sizes, and the table of all parts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import linear_regression, median
from typing import Any

from torchrl_grpo.runtime.malloc import frozen_objects

# What no part may grow faster than: a power of its size.
_MOST_EXPONENT = 1.1


@dataclass(frozen=True)
class Part:
    """Something whose cost is measured at several sizes.

    Attributes:
        title: what it is, for the table.
        size: unit of the sizes.
        sizes: sizes to measure, the smallest first.
        measure: function of a size that returns the cost of all of it, such as seconds.
        figure: function of size and cost that returns the number for the table.
        unit: unit of that number.
        target: bound of that number; None for none.
        is_least: whether the target is the smallest number allowed, not the largest.
        target_from: smallest size that the target is for.
        while_training: whether ``grpo-async.py`` does it while it trains, when what it has built is frozen.
        repeats: number of measurements at each size. The least cost of a size counts, because other processes
            and a cold start only add to it. The exponent is the median of those of all repetitions, because
            the sizes of a repetition are measured one after the other: what slows a machine for minutes
            slows them all.
    """

    title: str
    size: str
    sizes: tuple[int, ...]
    measure: Callable[[int], float]
    figure: Callable[[int, float], float]
    unit: str
    target: float | None = None
    is_least: bool = False
    target_from: int = 0
    while_training: bool = True
    repeats: int = 1

    def costs(self) -> list[float]:
        """Measure each size once."""

        def measure(size: int) -> float:
            with frozen_objects() if self.while_training else nullcontext():
                return self.measure(size)

        return [measure(size) for size in self.sizes]

    def result(self, rounds: Sequence[Sequence[float]]) -> dict[str, Any]:
        """Return what the result file says of the part, from what several calls of :meth:`costs` returned."""
        costs = [min(measured) for measured in zip(*rounds, strict=True)]
        figures = [self.figure(size, cost) for size, cost in zip(self.sizes, costs, strict=True)]
        power = median(exponent(self.sizes, measured) for measured in rounds) if len(self.sizes) > 1 else None
        return {
            "part": self.title,
            "size": self.size,
            "sizes": list(self.sizes),
            "costs": costs,
            "repetitions": [list(measured) for measured in rounds],
            "shown": [f"{figure:.3g} {self.unit}" for figure in figures],
            "target": self._target(),
            "exponent": power,
            "holds": self._holds(figures, power),
        }

    def _target(self) -> str:
        if self.target is None:
            return ""
        where = f" from {self.target_from:,} {self.size}" if self.target_from > self.sizes[0] else ""
        return f"{'at least' if self.is_least else 'at most'} {self.target:g} {self.unit}{where}"

    def _holds(self, figures: Sequence[float], power: float | None) -> bool:
        if power is not None and power > _MOST_EXPONENT:
            return False
        if self.target is None:
            return True
        counted = [
            figure for size, figure in zip(self.sizes, figures, strict=True) if size >= self.target_from
        ]
        return min(counted) >= self.target if self.is_least else max(counted) <= self.target


def in_turn(parts: Mapping[str, Part], say: Callable[[str], object]) -> list[dict[str, Any]]:
    """Measure parts, and return what the result file says of each.

    Repetitions of a part are spread over the whole time, because other programs may be busy for a minute.

    Args:
        parts: parts by their names.
        say: function that receives a line when a part has been measured.
    """
    rounds: dict[str, list[list[float]]] = {name: [] for name in parts}
    results = []
    for number in range(max(part.repeats for part in parts.values())):
        for name, part in parts.items():
            if number < part.repeats:
                rounds[name].append(part.costs())
            if number == part.repeats - 1:
                results.append({"name": name, **part.result(rounds[name])})
                say(f"{name}: {', '.join(results[-1]['shown'])}")
    return sorted(results, key=lambda result: list(parts).index(result["name"]))


def exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """Return the power of the size that the cost grows with, the slope of a line through the logarithms."""
    return linear_regression([math.log(size) for size in sizes], [math.log(cost) for cost in costs]).slope


def fastest(work: Callable[[], object]) -> float:
    """Return the least processor time of three calls in seconds: other processes only make a call slower."""
    times = []
    for _ in range(3):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def microseconds(size: int, cost: float) -> float:
    """Return a cost in seconds as microseconds for each unit of the size."""
    return cost / size * 1e6


def total(_: int, cost: float) -> float:
    """Return a cost as it is."""
    return cost


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the Markdown table of the results."""
    lines = [
        "| part | size | at the smallest size | at the largest | target "
        f"| exponent, at most {_MOST_EXPONENT:g} | holds |",
        "| --- " * 7 + "|",
    ]
    for row in results:
        first, last = row["sizes"][0], row["sizes"][-1]
        power = "" if row["exponent"] is None else f"{row['exponent']:.2f}"
        range_ = f"{first:,} to {last:,}" if last > first else f"{first:,}"
        cells = [row["part"], f"{range_} {row['size']}", row["shown"][0], row["shown"][-1]]
        cells += [row["target"], power, "yes" if row["holds"] else "no"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
