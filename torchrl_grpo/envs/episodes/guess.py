"""A guessing game: find a number with as few guesses as the environment allows."""

from __future__ import annotations

import re
from typing import Any

from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.episodes.types import Step

_NUMBER = re.compile(r"-?\d+")


def problems(split: str, width: int = 8, largest: int = 90) -> list[dict[str, Any]]:
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
            question = f"Guess my number. It is from {low} to {high}. Reply with one number only."
            rows += [{"question": question, "answer": str(number)} for number in range(low, high + 1)]
    return rows


class Guess:
    """The game of one number. A right guess is worth 1 and ends it; a reply without a number ends it too."""

    def reset(self, example: Example) -> None:
        """Think of the number of a problem."""
        self.number = int(example.truth["answer"])

    def step(self, message: str) -> Step:
        """Answer a guess, which is the first number of the message."""
        found = _NUMBER.search(message)
        if found is None:
            return Step(done=True)
        guess = int(found.group()) if len(found.group()) < 20 else 10**20
        if guess == self.number:
            return Step(reward=1.0, done=True)
        word = "higher" if self.number > guess else "lower"
        return Step([{"role": "user", "content": word}])
