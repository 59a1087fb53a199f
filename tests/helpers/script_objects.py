"""What a user's script gives to ``GRPOTrainer``: rows, a reward, and a data set with rewards of its own.

Processes that call these import this module, so it imports nothing that takes seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

ROWS = [{"question": f"{a} plus {b}", "answer": str(a + b)} for a in range(5) for b in range(5)]


def shorter(completion: str, example: Any) -> float:
    return 1 / (1 + len(completion))


class Asking:
    """Rows on demand, with rewards of their own."""

    def __init__(self, start: int) -> None:
        self.start = start

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"prompt": [{"role": "user", "content": f"What is {self.start + index}?"}]}

    def get_reward(self, index: int, completion: str) -> float:
        return float(self.start + index)


class Item:
    """A row that is an object, with a reward of its own and something that no column can hold."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.judge = object

    @property
    def question(self) -> str:
        return f"What is {self.number}?"

    def get_reward(self, completion: str) -> float:
        return float(self.number)


class Endless:
    """A stream without an end, which begins anew each time."""

    def __iter__(self) -> Iterator[dict[str, str]]:
        return ({"prompt": f"Greet guest number {number}."} for number in itertools.count())
