r"""What the math_verify worker does: parse both answers and compare them. Runs in a worker process only.

An answer that leaves arithmetic undone is no answer to a truth that is worked out: 16+16 is not paid for 32,
although the two are equal, because the question itself is such an expression.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import math_verify
import sympy

# It warns once that its own time limit is off; the limit is the pool's.
logging.getLogger("math_verify").setLevel(logging.ERROR)

# An escaped dollar is money, and an environment such as pmatrix is no formula to the parser without dollars.
_HAS_MATH = re.compile(r"(?<!\\)\$|\\\(|\\\[|\\boxed")
# What makes prose of a text; commands of LaTeX are not words, and neither is what stands in \text{}.
_NO_WORD = re.compile(r"\\text\s*\{[^{}]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{2,}")
_PROSE = 3
# What the parser works out by itself, so that only the text still shows it: numbers and divisions alone, once
# brackets, signs, spaces and the like are taken out. A space stands for each: it may end a command's name.
_AROUND_NUMBERS = re.compile(
    r"\\(?:left|right|displaystyle|cdot|times|quad)(?![A-Za-z])|\\[,;:!{}$%\s]|\^\{?\\circ\}?|[-+−*×·()\[\]{}$%~]"
)
_WORKED_OUT_BY_PARSER = re.compile(
    r"(?=.*(?:[/:÷]|\\))(?:[\d.,\s/:÷]|\\(?:div|over|choose|[cdt]?frac|[dt]?binom)(?![A-Za-z]))+", re.DOTALL
)


def run(payload: dict[str, str]) -> float:
    """Compare an answer with the truth.

    Args:
        payload: ``answer``: what the model gave, a short answer or a whole text; ``truth``: LaTeX.

    Returns:
        1.0 if they are mathematically the same and the answer is worked out as far as the truth, else 0.0.

    Raises:
        ValueError: the truth cannot be read, so nothing could ever equal it.
    """
    truth = _parse(payload["truth"])
    if not truth:
        raise ValueError(f"math_verify cannot read the truth {payload['truth']!r}")
    words = _WORD.findall(_NO_WORD.sub(" ", payload["answer"]))
    answer = _parse(payload["answer"], prose=len(words) >= _PROSE)
    whole = any(_is_number(part) and part.is_finite and part == int(part) for part in truth)
    if not any(_undone(part) for part in truth) and not (whole and _worked_out_by_parser(truth)):
        equation = any(isinstance(part, sympy.core.relational.Relational) for part in truth)
        names = any(part.free_symbols for part in truth if isinstance(part, sympy.Basic))
        answer = _worked_out(answer, whole, equation, names)
    # Its own limits are signals; they are off, the pool's limit stands in. Errors inside must not become
    # "wrong".
    return float(math_verify.verify(truth, answer, timeout_seconds=None, raise_on_error=True))


def _parse(text: str, prose: bool = False) -> list[Any]:
    """The expressions in a text, each with its piece of the text behind it.

    LaTeX that stands alone is first read as a formula. Prose is not: its letters would become factors.
    """
    alone = not _HAS_MATH.search(text) and len(text) <= 1_000
    found: list[Any] = []
    if alone and not prose:
        found = math_verify.parse(f"${text}$", parsing_timeout=None)
    found = found or math_verify.parse(text, parsing_timeout=None)
    if alone and prose and not found:
        found = math_verify.parse(f"${text}$", parsing_timeout=None)
    return found


def _worked_out(found: list[Any], whole: bool, equation: bool, names: bool) -> list[Any]:
    """What is worked out among the expressions in an answer.

    Args:
        found: the answer as :func:`_parse` gives it.
        whole: whether the truth is a whole number; a quotient of numbers is not worked out then.
        equation: whether the truth is one; otherwise an equation's last side that is worked out is taken.
        names: whether the truth has any; otherwise a side with names says what the answer is called.
    """
    if whole and _worked_out_by_parser(found):
        # 8 = 16/2 is an answer, its first side.
        rest = (_without_last_quotients(text) for text in found if isinstance(text, str))
        found = [part for text in rest if text for part in _parse(text)]
    kept: list[Any] = []
    for part in found:
        sides = [] if equation else _sides(part)
        if sides:
            done = [side for side in sides if not _undone(side, whole)]
            kept += [side for side in done if names or not side.free_symbols][-1:]
        elif not _undone(part, whole):
            kept.append(part)
    return kept


def _sides(part: Any) -> list[Any]:
    """The sides of an equation, or of a chain of them, in the order of the text; none of anything else.

    The parser gives a chain as a conjunction, which sorts its links. So the chain is followed back from its
    end, the right-hand side that is no link's left-hand side. One that ends as it began has no such side.
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


def _worked_out_by_parser(found: list[Any]) -> bool:
    """Whether a text ends in a quotient or the like of numbers, which the parser turns into its value."""
    return any(text != _without_last_quotients(text) for text in found if isinstance(text, str))


def _without_last_quotients(text: str) -> str:
    """The text without the last sides of its equation that the parser works out; empty where all are such."""
    sides = text.split("=")
    while sides and _WORKED_OUT_BY_PARSER.fullmatch(_AROUND_NUMBERS.sub(" ", sides[-1])):
        sides.pop()
    return "=".join(sides)


def _undone(part: Any, whole: bool = False) -> bool:
    """Whether an expression holds arithmetic on numbers that somebody should have done.

    Args:
        part: an expression, unevaluated; text counts as done.
        whole: a quotient of two numbers is undone, too, as it is where the truth is a whole number.
    """
    if not isinstance(part, sympy.Basic):
        return False
    return any(_computes(node, whole) for node in sympy.preorder_traversal(part))


def _computes(node: Any, whole: bool) -> bool:
    if isinstance(node, sympy.Add):
        constant = [item for item in node.args if not item.free_symbols]
        # A sum that has fewer terms when it is worked out; 1 + sqrt(2) has not.
        return len(constant) > 1 and len(sympy.Add.make_args(sympy.Add(*constant).doit())) < len(constant)
    if isinstance(node, sympy.Mul):
        # A number over another is a fraction, which is worked out unless the truth is a whole number.
        factors = [item for item in node.args if _is_number(item) or (whole and _is_one_over_number(item))]
        return len([item for item in factors if abs(item) != 1]) > 1
    if isinstance(node, sympy.Pow) and _is_number(node.base) and _is_number(node.exp):
        # 10 to a power is how some numbers are written, and an exponent of -1 is a fraction.
        plain = node.base == 10 or node.exp == -1
        return not plain and bool(node.exp.is_Integer or node.doit().is_Rational)
    if node.is_Function and not node.free_symbols:
        # A factorial is a whole number, and may be too large to work out for the sake of this question.
        return isinstance(node, sympy.factorial) or bool(node.doit().is_Rational)
    return False


def _is_number(part: Any) -> bool:
    return isinstance(part, sympy.Number)


def _is_one_over_number(part: Any) -> bool:
    return isinstance(part, sympy.Pow) and _is_number(part.base) and part.exp == -1
