r"""GSM8K: is the number right? Strict and flexible extraction, reported apart.

strict: the one number inside the last closed ``<answer>`` tag; without such a tag, the one number on the line
    after the last ``####``. Several numbers there ("1 2 3 72") are no answer.
flexible: the strict number; else that in the last ``\boxed{}``; else the last number of the text.
"""

from __future__ import annotations

from fractions import Fraction

from torchrl_grpo.data.example import Example
from torchrl_grpo.data.latex import last_boxed
from torchrl_grpo.rewards import extract, numbers


def strict_number(completion: str) -> Fraction | None:
    """The number by strict extraction, or None."""
    found = _marked(completion)
    return None if found is None else _value(found)


def flexible_number(completion: str) -> Fraction | None:
    """The number by flexible extraction, or None."""
    strict = strict_number(completion)
    if strict is not None:
        return strict
    boxed = last_boxed(completion)
    value = None if boxed is None else numbers.only(boxed)
    return numbers.last(completion) if value is None else value


def judge(completion: str, truth: str) -> dict[str, float]:
    """Strict and flexible correctness.

    Args:
        completion: what the model wrote.
        truth: the right answer, as in the data.

    Returns:
        ``{"strict": 0 or 1, "flexible": 0 or 1}``. A truth that is no number is compared as text with what
        strict extraction finds.
    """
    right = numbers.only(truth)
    if right is None:
        found = _marked(completion)
        equal = float(found is not None and numbers.same(found, truth))
        return {"strict": equal, "flexible": equal}
    strict, flexible = strict_number(completion), flexible_number(completion)
    return {"strict": float(strict == right), "flexible": float(flexible == right)}


class Gsm8kReward:
    """1.0 for the right number.

    Args:
        score: which extraction is weighted, ``"strict"`` or ``"flexible"``; both are logged.
    """

    name = "gsm8k"

    def __init__(self, score: str = "strict") -> None:
        self._score = score

    def __call__(self, completion: str, example: Example) -> dict[str, float]:
        """``score``, ``strict`` and ``flexible``, each 0 or 1."""
        parts = judge(completion, example.truth["answer"])
        return {"score": parts[self._score], **parts}


def _marked(completion: str) -> str | None:
    found = extract.tagged(completion)
    return extract.after_hashes(completion) if found is None else found


def _value(marked: str) -> Fraction | None:
    r"""The number in what was marked as the answer; a box or a ``####`` inside it narrows it down."""
    boxed = last_boxed(marked[:10_000])
    if boxed is not None:
        return numbers.only(boxed)
    _, _, rest = marked.rpartition("####")
    return numbers.only(rest.strip())
