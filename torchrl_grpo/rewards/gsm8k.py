r"""GSM8K: correctness of the final number, with strict and flexible extraction.

strict: the only number inside the last closed ``<answer>`` tag. Without such a tag, the only number between
    the last ``####`` and the end of its line. Several numbers ("1 2 3 72") are no answer, and neither are
    several boxes with different numbers, a comparison ("x > 72"), or a division left undone ("144/2").
flexible: the strict number, else the number in the last ``\boxed{}``, else the last number of the text.

Thoughts that a completion begins with are no part of the answer.
"""

from __future__ import annotations

import re
from fractions import Fraction

from torchrl_grpo.config import Config
from torchrl_grpo.data.example import Example
from torchrl_grpo.data.latex import last_boxed
from torchrl_grpo.rewards import extract, numbers
from torchrl_grpo.rewards.sandbox.written import CHANGES_NEXT

_BOX = re.compile(r"\\f?boxed\s{0,8}\{[^{}]*\}")
_MARK = re.compile(r"\\f?boxed|####")
_DIGIT = re.compile("[0-9]")
_HTML = re.compile(r"</?[a-z]+>|[-=]+>|<<[^<>]*>>", re.IGNORECASE)
_COMPARISON = re.compile(r"[<>≤≥≠]|!=|(?:\b(?:not|than)|n't)\b[^0-9]*[0-9]", re.IGNORECASE)
_LETTER = re.compile(r"[^\W\d_]")


def strict_number(completion: str) -> Fraction | None:
    """Return the number by strict extraction, or None."""
    answer = _marked(completion)
    return None if answer is None else _value(answer)


def flexible_number(completion: str) -> Fraction | None:
    """Return the number by flexible extraction, or None."""
    strict = strict_number(completion)
    completion = _said(completion)
    if strict is not None:
        return strict
    boxed = last_boxed(completion)
    value = None if boxed is None else numbers.only(boxed)
    return numbers.last(completion) if value is None else value


def grade_answer(completion: str, truth: str) -> dict[str, float]:
    """Judge a completion by strict and flexible extraction.

    Args:
        completion: text that the model wrote.
        truth: correct answer, as in the data.

    Returns:
        ``{"strict": 0 or 1, "flexible": 0 or 1}``. If the truth is not a number, both compare the text of the
        strict extraction with it.
    """
    right = numbers.only(truth)
    if right is None:
        answer = _marked(completion)
        equal = float(answer is not None and numbers.same(answer, truth))
        return {"strict": equal, "flexible": equal}
    strict, flexible = strict_number(completion), flexible_number(completion)
    return {"strict": float(strict == right), "flexible": float(flexible == right)}


class Gsm8kReward:
    """1.0 for the correct number.

    Args:
        score: extraction that the score uses, ``"strict"`` or ``"flexible"``. Both are logged.
    """

    name = "gsm8k"

    def __init__(self, score: str = "strict") -> None:
        self._score = score

    def __call__(self, completion: str, example: Example) -> dict[str, float]:
        """Return ``score``, ``strict`` and ``flexible``, each 0 or 1."""
        parts = grade_answer(completion, example.truth["answer"])
        return {"score": parts[self._score], **parts}


def _said(completion: str) -> str:
    return extract.answer(completion, "plain") or ""


def _marked(completion: str) -> str | None:
    completion = _said(completion)
    answer = extract.tagged(completion)
    return extract.after_hashes(completion) if answer is None else answer


def _value(marked: str) -> Fraction | None:
    r"""Return the number in a marked answer. Lines with a box or a ``####`` take precedence over others."""
    marked = _BOX.sub(lambda box: box[0].replace("\n", " "), marked[-10_000:])
    lines = [line for line in marked.splitlines() if line.strip()]
    noted = [index for index, line in enumerate(lines) if _MARK.search(line)]
    if not noted:
        return _only(marked)
    value, *others = {_only(lines[index].replace("####", " ")) for index in noted}
    # Another number alone on its line, or after the marked one, is another answer and not work.
    for line in lines[: noted[-1]]:
        if not _MARK.search(line) and not _LETTER.search(line) and numbers.only(line) not in (None, value):
            return None
    if any(_DIGIT.search(line) and numbers.only(line) != value for line in lines[noted[-1] + 1 :]):
        return None
    return None if others else value


def _only(text: str) -> Fraction | None:
    """Return the only number of a text, if nothing before it changes it."""
    if len(text) > 200:
        return None
    text = _HTML.sub(" ", numbers.plain(text))
    digit = _DIGIT.search(text)
    if digit is None or CHANGES_NEXT.search(text[: digit.start()]) or _COMPARISON.search(text):
        return None
    return numbers.only(text.strip())


def build(cfg: Config) -> Gsm8kReward:
    """Return the reward of a configuration; ``env.answer_format`` is read."""
    # If the prompt requests tags, they are required. Otherwise the number may be anywhere.
    return Gsm8kReward("strict" if cfg.env.answer_format == "tags" else "flexible")
