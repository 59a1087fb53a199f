"""Two small rewards about the answer's text: does it equal the truth, and is it a bare number."""

from __future__ import annotations

import re

from torchrl_grpo.data.example import Example
from torchrl_grpo.rewards import extract

_BARE_NUMBER = re.compile(r"[-+−]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)")


def normalised(text: str) -> str:
    """Lower case, single spaces, no full stop at the end."""
    return " ".join(text.casefold().split()).removesuffix(".").rstrip()


class ExactMatchReward:
    """1.0 when the answer equals the truth, case, spacing and a final full stop aside.

    Args:
        answer_format: where the answer stands, as ``env.answer_format``; without a closed tag it is 0.
    """

    name = "exact_match"

    def __init__(self, answer_format: str) -> None:
        self._format = answer_format

    def __call__(self, completion: str, example: Example) -> float:
        """0 or 1."""
        answer = extract.answer(completion, self._format)
        return float(answer is not None and normalised(answer) == normalised(example.truth["answer"]))


class BareNumberReward:
    """1.0 when the answer is an integer or a decimal and nothing else, right or wrong.

    Args:
        answer_format: where the answer stands, as ``env.answer_format``; without a closed tag it is 0.
    """

    name = "bare_number"

    def __init__(self, answer_format: str) -> None:
        self._format = answer_format

    def __call__(self, completion: str, example: Example) -> float:
        """0 or 1."""
        answer = extract.answer(completion, self._format)
        return float(answer is not None and _BARE_NUMBER.fullmatch(answer) is not None)
