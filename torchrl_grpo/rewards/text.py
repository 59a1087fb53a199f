"""Small rewards on the text of the answer: equality to the truth, a bare number, closeness to the truth."""

from __future__ import annotations

import re

from torchrl_grpo.config import Config
from torchrl_grpo.data.example import Example
from torchrl_grpo.rewards import extract, numbers

# The letter of a choice as data sets have it, "B" or "(B)", and as models write it: also "b.", "B)" or
# "B) 5 cm" in one line, without another capital letter that stands alone.
_LETTER = re.compile(r"\(?([A-Z])\)?")
_CHOICE = re.compile(r"\(?([A-Za-z])(?:[).]+(?:[^\S\n](?:(?!\b[A-Z]\b).)*)?)?")
_BARE_NUMBER = re.compile(r"[-+−]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)")


def normalized(text: str) -> str:
    """Return the text in lower case, with single spaces and without a final period."""
    return " ".join(text.casefold().split()).removesuffix(".").rstrip()


class _AnswerReward:
    """Base class of rewards on the answer. A completion without an answer scores 0.

    Args:
        answer_format: format of the answer, see :func:`~torchrl_grpo.rewards.extract.answer`.
    """

    def __init__(self, answer_format: str) -> None:
        self._format = answer_format


class ExactMatchReward(_AnswerReward):
    """1.0 if the answer equals the truth. Case, spacing and a final period are ignored.

    A truth that is a capital letter, alone or in parentheses, is a choice: the letter of the answer counts.
    """

    name = "exact_match"

    def __call__(self, completion: str, example: Example) -> float:
        """Return 0 or 1."""
        answer = extract.answer(completion, self._format)
        if answer is None:
            return 0.0
        written, truth = normalized(answer), normalized(example.truth["answer"])
        letter = _LETTER.fullmatch(example.truth["answer"].strip())
        if letter is not None and (choice := _CHOICE.fullmatch(answer.strip())) is not None:
            return float(choice[1].upper() == letter[1])
        return float(written == truth)


class BareNumberReward(_AnswerReward):
    """1.0 if the answer is only an integer or a decimal number, correct or not."""

    name = "bare_number"

    def __call__(self, completion: str, example: Example) -> float:
        """Return 0 or 1."""
        answer = extract.answer(completion, self._format)
        return float(answer is not None and _BARE_NUMBER.fullmatch(answer) is not None)


class ClosenessReward(_AnswerReward):
    """``1 / (1 + |answer - truth|)`` for a bare number. It gives a signal while correct answers are rare."""

    name = "closeness"

    def __call__(self, completion: str, example: Example) -> float:
        """Return a score between 0 and 1, where 1 is correct.

        Raises:
            ValueError: the truth is not a number.
        """
        truth = example.truth["answer"] if "answer" in example.truth else example.truth["entry"]["answer"]
        goal = numbers.only(str(truth))
        if goal is None:
            raise ValueError(f"the truth of {example.id} is {truth!r}, which is not a number")
        answer = extract.answer(completion, self._format)
        if answer is None or _BARE_NUMBER.fullmatch(answer) is None:
            return 0.0
        value = numbers.only(answer)
        return 0.0 if value is None else float(1 / (1 + abs(value - goal)))


def build_exact_match(cfg: Config) -> ExactMatchReward:
    """Return the reward of a configuration; ``env.answer_format`` is read."""
    return ExactMatchReward(cfg.env.answer_format)


def build_bare_number(cfg: Config) -> BareNumberReward:
    """Return the reward of a configuration; ``env.answer_format`` is read."""
    return BareNumberReward(cfg.env.answer_format)


def build_closeness(cfg: Config) -> ClosenessReward:
    """Return the reward of a configuration; ``env.answer_format`` is read."""
    return ClosenessReward(cfg.env.answer_format)
