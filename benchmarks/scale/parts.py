"""A part of the control plane, its measurement at several sizes, and the table of all parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Part:
    """Something whose cost is measured at several sizes.

    Attributes:
        title: what it is, for the table.
        size: unit of the sizes.
        sizes: sizes to measure, the smallest first.
        measure: function of a size that returns the cost of all of it, such as seconds.
        show: function of size and cost that returns the text for the table.
    """

    title: str
    size: str
    sizes: tuple[int, ...]
    measure: Callable[[int], float]
    show: Callable[[int, float], str]

    def run(self) -> dict[str, Any]:
        """Measure all sizes, and return what the result file says of the part."""
        costs = [self.measure(size) for size in self.sizes]
        return {
            "part": self.title,
            "size": self.size,
            "sizes": list(self.sizes),
            "costs": costs,
            "shown": [self.show(size, cost) for size, cost in zip(self.sizes, costs, strict=True)],
            "exponent": exponent(self.sizes, costs),
        }


def exponent(sizes: Sequence[int], costs: Sequence[float]) -> float | None:
    """Return the power of the size that the cost grows with, from the smallest to the largest size.

    None if there is a single size.
    """
    if len(sizes) < 2:
        return None
    return math.log(costs[-1] / costs[0]) / math.log(sizes[-1] / sizes[0])


def microseconds(what: str) -> Callable[[int, float], str]:
    """Return a function that shows seconds as microseconds for each of ``what``."""
    return lambda size, seconds: f"{seconds / size * 1e6:.3g} µs a {what}"


def seconds(_: int, cost: float) -> str:
    """Show seconds."""
    return f"{cost:.3g} s"


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the Markdown table of the results."""
    lines = ["| part | size | cost at the smallest size | at the largest | exponent |", "| --- " * 5 + "|"]
    for row in results:
        first, last = row["sizes"][0], row["sizes"][-1]
        power = "" if row["exponent"] is None else f"{row['exponent']:.2f}"
        range_ = f"{first:,} to {last:,}" if last > first else f"{first:,}"
        cells = row["part"], f"{range_} {row['size']}", row["shown"][0], row["shown"][-1], power
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
