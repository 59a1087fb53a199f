"""Countdown: combine given numbers to a target, with feedback on every attempt."""

from __future__ import annotations

import ast
import random
import re
import zlib
from typing import Any

from torchrl_grpo.data.example import Example
from torchrl_grpo.data.identity import number_puzzle
from torchrl_grpo.envs.episodes.tools.calculator import evaluate
from torchrl_grpo.envs.episodes.types import Step

_OPERATORS = ("+", "-", "*")
# Whole numbers, the four operations and brackets; no powers, which "**" would be.
_ALLOWED = re.compile(r"(?:[\d ()/+-]|\*(?!\*)){1,200}")


def problems(split: str, size: int = 1_000, numbers: int = 3, largest: int = 9) -> list[dict[str, Any]]:
    """Make solvable problems, for ``env.dataset``.

    The same numbers, in any order, with the same target are in one split only.

    Args:
        split: ``train`` or ``test``.
        size: number of problems in a split.
        numbers: how many numbers a problem has.
        largest: largest of them.

    Raises:
        ValueError: there are too few problems of this size.
    """
    draw = random.Random(f"countdown of {split}")
    rows: list[dict[str, Any]] = []
    for _ in range(100 * size):
        if len(rows) == size:
            return rows
        chosen = [draw.randint(1, largest) for _ in range(numbers)]
        expression = str(chosen[0])
        for number in chosen[1:]:
            expression = f"({expression} {draw.choice(_OPERATORS)} {number})"
        target = evaluate(ast.parse(expression, mode="eval").body)
        if _is_held_out(chosen, int(target)) != (split == "test"):
            continue
        shuffled = draw.sample(chosen, len(chosen))
        rows.append(
            {
                "question": f"Use each of the numbers {', '.join(map(str, shuffled))} once, with + - * / and "
                f"brackets, to make {target}. Reply with the expression alone.",
                "answer": expression,
                "numbers": shuffled,
                "target": target,
                "identity": number_puzzle(chosen, target),
            }
        )
    raise ValueError(f"numbers={numbers} up to largest={largest} make too few problems; raise one of them")


def _is_held_out(numbers: list[int], target: int) -> bool:
    """Whether a problem is in the test split, as a tenth of all problems are, whatever else is drawn."""
    return zlib.crc32(f"{sorted(numbers)} {target}".encode()) % 10 == 0


class Countdown:
    """The game of one problem. The right expression is worth 1 and ends it."""

    def reset(self, example: Example) -> None:
        """Take the numbers and the target of a problem."""
        self.numbers = sorted(example.columns["numbers"])
        self.target = example.columns["target"]

    def step(self, message: str) -> Step:
        """Answer an attempt, which is the last line of the message, as far as an equals sign."""
        lines = message.strip().splitlines()
        expression = lines[-1].partition("=")[0].strip() if lines else ""
        wrong = self._mistake(expression)
        return Step(reward=1.0, done=True) if wrong is None else Step([{"role": "user", "content": wrong}])

    def _mistake(self, expression: str) -> str | None:
        if not _ALLOWED.fullmatch(expression):
            return "That is not an expression that I can compute. Try again."
        used = sorted(int(number) for number in re.findall(r"\d{1,9}", expression))
        try:
            value = evaluate(ast.parse(expression, mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return "That is not an expression that I can compute. Try again."
        if used != self.numbers:
            return f"Use each of {', '.join(map(str, self.numbers))} exactly once. Try again."
        if abs(value - self.target) > 1e-9:
            made = f"{value:g}" if abs(value) < 1e15 else "a very large number"
            return f"That makes {made}, not {self.target}. Try again."
        return None
