"""Numbers of many rollouts in little memory: a typed array for each column."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

INTEGERS = ("step", "group", "problem", "length", "version")
CODES = ("finish", "discarded")
NUMBERS = ("reward", "advantage")
# Rewards and components beyond these are left out.
MOST_PARTS = 24


class Columns:
    """A table of numbers that grows by rows.

    Args:
        most: number of rows to keep. Beyond it, the oldest quarter is dropped.

    Attributes:
        columns: column by name; ``part:NAME`` is the reward ``NAME``.
        dropped: number of rows that were dropped.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.dropped = 0
        types = {**dict.fromkeys(INTEGERS, "i"), **dict.fromkeys(CODES, "B"), **dict.fromkeys(NUMBERS, "f")}
        self.columns: dict[str, array[Any]] = {name: array(code) for name, code in types.items()}

    def __len__(self) -> int:
        return len(self.columns["step"])

    def append(self, row: Mapping[str, int | float], parts: Mapping[str, object]) -> int:
        """Add a row, and return its number, which counts dropped rows too.

        Args:
            row: value of each column.
            parts: rewards by name. What is no number becomes NaN.
        """
        count = len(self)
        for name, value in row.items():
            self.columns[name].append(value)
        for name in parts:
            key = f"part:{name}"
            if key not in self.columns and len(self.parts()) < MOST_PARTS:
                self.columns[key] = array("f", [math.nan]) * count
        for key in self.columns:
            if key.startswith("part:"):
                self.columns[key].append(number(parts.get(key.removeprefix("part:"))))
        if count + 1 > self.most:
            quarter = (count + 1) // 4
            self.dropped += quarter
            for column in self.columns.values():
                del column[:quarter]
        return self.dropped + len(self) - 1

    def parts(self) -> Sequence[str]:
        """Return the names of the columns of rewards."""
        return [name for name in self.columns if name.startswith("part:")]


def number(value: object) -> float:
    """Return a number of a JSON line; NaN for anything else, or what a float32 cannot hold."""
    if isinstance(value, int | float) and abs(value) < 3e38:
        return float(value)
    return math.nan
