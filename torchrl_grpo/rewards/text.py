"""Small rewards about the answer's text: equal to the truth, a bare number, a number near the truth."""

from __future__ import annotations

import re

from torchrl_grpo.data.example import Example
from torchrl_grpo.rewards import extract, numbers

_BARE_NUMBER = re.compile(r"[-+−]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)")


def normalized(text: str) -> str:
    """Lower case, single spaces, no full stop at the end."""
    return " ".join(text.casefold().split()).removesuffix(".").rstrip()


class _OfAnswer:
    """What the rewards of this file share.

    Args:
        answer_format: where the answer stands, as ``env.answer_format``; where there is none: 0.
    """

    def __init__(self, answer_format: str) -> None:
        self._format = answer_format


class ExactMatchReward(_OfAnswer):
    """1.0 when the answer equals the truth, case, spacing and a final full stop aside."""

    name = "exact_match"

    def __call__(self, completion: str, example: Example) -> float:
        """0 or 1."""
        answer = extract.answer(completion, self._format)
        return float(answer is not None and normalized(answer) == normalized(example.truth["answer"]))


class BareNumberReward(_OfAnswer):
    """1.0 when the answer is an integer or a decimal and nothing else, right or wrong."""

    name = "bare_number"

    def __call__(self, completion: str, example: Example) -> float:
        """0 or 1."""
        answer = extract.answer(completion, self._format)
        return float(answer is not None and _BARE_NUMBER.fullmatch(answer) is not None)


class ClosenessReward(_OfAnswer):
    """``1 / (1 + |answer - truth|)`` for a bare number: a slope where right ones are still rare."""

    name = "closeness"

    def __call__(self, completion: str, example: Example) -> float:
        """Between 0 and 1; 1 is right.

        Raises:
            ValueError: the truth is no number, so nothing is near it.
        """
        truth = example.truth["answer"] if "answer" in example.truth else example.truth["entry"]["answer"]
        goal = numbers.only(str(truth))
        if goal is None:
            raise ValueError(f"the truth of {example.id} is {truth!r}, which is no number")
        answer = extract.answer(completion, self._format)
        if answer is None or _BARE_NUMBER.fullmatch(answer) is None:
            return 0.0
        value = numbers.only(answer)
        return 0.0 if value is None else float(1 / (1 + abs(value - goal)))
