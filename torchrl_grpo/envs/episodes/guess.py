"""A guessing game: find a number with the answers "higher" and "lower"."""

from __future__ import annotations

import re
from typing import Any

from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.episodes.types import Step

_NUMBER = re.compile(r"-?\d+")


def problems(split: str, width: int = 6, largest: int = 90) -> list[dict[str, Any]]:
    """Make problems of the game, for ``env.dataset``: every number of every range.

    Args:
        split: ``train`` or ``test``. A range is in one of them only, and one range in four is for ``test``.
        width: how many numbers a range has.
        largest: largest start of a range.
    """
    rows = []
    for low in range(1, largest + 1):
        high = low + width - 1
        if (low % 4 == 0) == (split == "test"):
            question = f"Guess my number. It is from {low} to {high}."
            rows += [
                {"question": question, "answer": str(number), "low": low, "high": high}
                for number in range(low, high + 1)
            ]
    return rows


class Guess:
    """The game of one number. The right guess ends it; a reply without a number ends it too.

    The rewards of a game that finds the number add up to 1, however many guesses it takes.

    Args:
        possible: reward of a wrong guess that agrees with the answers so far.
    """

    def __init__(self, possible: float = 0.1) -> None:
        self._possible = possible
        self._paid = 0.0

    def reset(self, example: Example) -> None:
        """Think of the number of a problem."""
        self._number = int(example.truth["answer"])
        self._low, self._high = example.columns["low"], example.columns["high"]

    def step(self, message: str) -> Step:
        """Answer a guess, which is the first number of the message."""
        match = _NUMBER.search(message)
        if match is None:
            return Step(done=True)
        guess = int(match.group()[:20])
        if guess == self._number:
            # Otherwise slow play would pay.
            return Step(reward=1.0 - self._paid, done=True)
        reward = self._possible if self._low <= guess <= self._high else 0.0
        self._paid += reward
        if guess < self._number:
            self._low = max(self._low, guess + 1)
            return Step([{"role": "user", "content": "higher"}], reward)
        self._high = min(self._high, guess - 1)
        return Step([{"role": "user", "content": "lower"}], reward)
