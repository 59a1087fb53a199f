r"""Job of the math_verify worker: parse both answers and compare them. It runs in a worker process only.

If the truth is fully evaluated, an answer with unevaluated arithmetic is wrong. For example, 16+16 is not
accepted for 32 although they are equal, because a model could copy such an expression from the question.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import math_verify
import sympy

from torchrl_grpo.rewards.sandbox.math_samples import SAMPLES

# math_verify warns once that its own time limit is off. The pool has a time limit.
logging.getLogger("math_verify").setLevel(logging.ERROR)

# An escaped dollar sign is money. The parser reads an environment such as pmatrix only between dollar signs.
_HAS_MATH = re.compile(r"(?<!\\)\$|\\\(|\\\[|\\boxed")
# LaTeX commands and the content of \text{} are not words. A text with at least _PROSE words is prose.
_NO_WORD = re.compile(r"\\text\s*\{[^{}]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{2,}")
_PROSE = 3
# The parser evaluates quotients of numbers by itself, so only the text shows that they were not evaluated.
# The second pattern matches numbers and divisions after the first one has removed brackets, signs and the
# like. A space replaces each of these, because it may end a command's name.
_AROUND_NUMBERS = re.compile(
    r"\\(?:left|right|displaystyle|cdot|times|quad)(?![A-Za-z])|\\[,;:!{}$%\s]|\^\{?\\circ\}?|[-+−*×·()\[\]{}$%~]"
)
_PARSER_EVALUATES = re.compile(
    r"(?=.*(?:[/:÷]|\\))(?:[\d.,\s/:÷]|\\(?:div|over|choose|[cdt]?frac|[dt]?binom)(?![A-Za-z]))+", re.DOTALL
)


def prepare(_: Any) -> None:
    """Let the parser learn the usual forms of an answer."""
    for text in SAMPLES:
        run({"answer": text, "truth": text})


def run(payload: dict[str, str]) -> float:
    """Compare an answer with the truth.

    Args:
        payload: mapping with ``answer`` (a short answer or the whole completion) and ``truth`` (LaTeX).

    Returns:
        1.0 if the two are mathematically equal and the answer is evaluated as far as the truth, else 0.0.

    Raises:
        ValueError: the truth cannot be parsed.
    """
    truth = _parse(payload["truth"])
    if not truth:
        raise ValueError(f"math_verify cannot parse the truth {payload['truth']!r}")
    words = _WORD.findall(_NO_WORD.sub(" ", payload["answer"]))
    answer = _parse(payload["answer"], prose=len(words) >= _PROSE)
    whole = any(_is_number(part) and part.is_finite and part == int(part) for part in truth)
    if not any(_has_unevaluated(part) for part in truth) and not (whole and _parser_evaluates(truth)):
        equation = any(isinstance(part, sympy.core.relational.Relational) for part in truth)
        names = any(part.free_symbols for part in truth if isinstance(part, sympy.Basic))
        answer = _evaluated(answer, whole, equation, names)
    # math_verify's own time limits use signals. They are off, because the pool has a time limit. An error
    # must not count as a wrong answer.
    return float(math_verify.verify(truth, answer, timeout_seconds=None, raise_on_error=True))


def _parse(text: str, prose: bool = False) -> list[Any]:
    """Parse the expressions in a text. The source text of each expression follows it in the list.

    Bare LaTeX is first parsed as a formula. Prose is not, because its letters would become factors.
    """
    alone = not _HAS_MATH.search(text) and len(text) <= 1_000
    found: list[Any] = []
    if alone and not prose:
        found = math_verify.parse(f"${text}$", parsing_timeout=None)
    found = found or math_verify.parse(text, parsing_timeout=None)
    if alone and prose and not found:
        found = math_verify.parse(f"${text}$", parsing_timeout=None)
    return found


def _evaluated(found: list[Any], whole: bool, equation: bool, names: bool) -> list[Any]:
    """Return the fully evaluated expressions of an answer.

    Args:
        found: the answer as parsed by :func:`_parse`.
        whole: whether the truth is a whole number. If so, a quotient of numbers is not fully evaluated.
        equation: whether the truth is an equation. If not, the last evaluated side of an equation is taken.
        names: whether the truth has symbols. If not, a side with symbols only names the answer and is
            ignored.
    """
    if whole and _parser_evaluates(found):
        # The first side of 8 = 16/2 is an answer.
        rest = (_without_last_quotients(text) for text in found if isinstance(text, str))
        found = [part for text in rest if text for part in _parse(text)]
    kept: list[Any] = []
    for part in found:
        sides = [] if equation else _sides(part)
        if sides:
            done = [side for side in sides if not _has_unevaluated(side, whole)]
            kept += [side for side in done if names or not side.free_symbols][-1:]
        elif not _has_unevaluated(part, whole):
            kept.append(part)
    return kept


def _sides(part: Any) -> list[Any]:
    """Return the sides of an equation or a chain of equations in text order; empty for other expressions.

    The parser returns a chain as a conjunction, which sorts its equations. The chain ends at the right-hand
    side that is not the left-hand side of another equation, and is followed backward from there. A chain that
    ends as it began has no such side.
    """
    links = [part] if isinstance(part, sympy.Equality) else part.args if isinstance(part, sympy.And) else ()
    if not links or not all(isinstance(link, sympy.Equality) for link in links):
        return []
    lefts = [link.lhs for link in links]
    sides = [link.rhs for link in links if link.rhs not in lefts]
    if len(sides) != 1:
        return [side for link in links for side in link.args]
    before = {link.rhs: link.lhs for link in links}
    while sides[0] in before:
        sides.insert(0, before.pop(sides[0]))
    return sides


def _parser_evaluates(found: list[Any]) -> bool:
    """Whether a text ends in a quotient or similar of numbers, which the parser evaluates by itself."""
    return any(text != _without_last_quotients(text) for text in found if isinstance(text, str))


def _without_last_quotients(text: str) -> str:
    """Remove the last sides of an equation that the parser evaluates by itself. The result may be empty."""
    sides = text.split("=")
    while sides and _PARSER_EVALUATES.fullmatch(_AROUND_NUMBERS.sub(" ", sides[-1])):
        sides.pop()
    return "=".join(sides)


def _has_unevaluated(part: Any, whole: bool = False) -> bool:
    """Whether an expression contains arithmetic on numbers that should have been evaluated.

    Args:
        part: unevaluated expression, or text, which counts as evaluated.
        whole: whether a quotient of two numbers counts as unevaluated, as it does for a whole-number truth.
    """
    if not isinstance(part, sympy.Basic):
        return False
    return any(_is_unevaluated(node, whole) for node in sympy.preorder_traversal(part))


def _is_unevaluated(node: Any, whole: bool) -> bool:
    if isinstance(node, sympy.Add):
        constant = [item for item in node.args if not item.free_symbols]
        # Evaluation leaves fewer terms. It does not for 1 + sqrt(2).
        return len(constant) > 1 and len(sympy.Add.make_args(sympy.Add(*constant).doit())) < len(constant)
    if isinstance(node, sympy.Mul):
        # A quotient of numbers is a fraction. It counts as evaluated unless the truth is a whole number.
        factors = [item for item in node.args if _is_number(item) or (whole and _is_one_over_number(item))]
        return len([item for item in factors if abs(item) != 1]) > 1
    if isinstance(node, sympy.Pow) and _is_number(node.base) and _is_number(node.exp):
        # Powers of 10 are part of scientific notation, and an exponent of -1 is a fraction.
        plain = node.base == 10 or node.exp == -1
        return not plain and bool(node.exp.is_Integer or node.doit().is_Rational)
    if node.is_Function and not node.free_symbols:
        # A factorial is always a whole number, and may be too large to evaluate.
        return isinstance(node, sympy.factorial) or bool(node.doit().is_Rational)
    return False


def _is_number(part: Any) -> bool:
    return isinstance(part, sympy.Number)


def _is_one_over_number(part: Any) -> bool:
    return isinstance(part, sympy.Pow) and _is_number(part.base) and part.exp == -1
