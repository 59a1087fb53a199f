r"""Job of the math_verify worker: parse both answers and compare them. It runs in a worker process only.

If the truth is fully evaluated, an answer with unevaluated arithmetic is wrong. For example, 16+16 is not
accepted for 32 although they are equal, because a model could copy such an expression from the question.
For a truth that is one number, the answer must have that number written out
(:mod:`torchrl_grpo.rewards.sandbox.written`). Only the other truths are compared by math_verify.
"""

from __future__ import annotations

import itertools
import logging
import re
from typing import Any

import latex2sympy2_extended.latex2sympy2 as latex2sympy
import math_verify
import math_verify.parser
import sympy
from latex2sympy2_extended.logic import And
from latex2sympy2_extended.math_normalization import extract_boxed_content
from sympy.concrete.expr_with_limits import ExprWithLimits

from torchrl_grpo.data.thoughts import after_last
from torchrl_grpo.rewards import numbers
from torchrl_grpo.rewards.sandbox import clock, written
from torchrl_grpo.rewards.sandbox.math_samples import SAMPLES

# math_verify warns once that its own time limit is off. The pool has a time limit.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
# An escaped dollar sign is money. The parser reads an environment such as pmatrix only between dollar signs.
_HAS_MATH = re.compile(r"(?<!\\)\$|\\\(|\\\[|\\boxed")
# LaTeX commands and the content of \text{} are not words. A text with at least _PROSE words is prose.
_NO_WORD = re.compile(r"\\text\s*\{[^{}]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{2,}")
_PROSE = 3
# What joins the numbers of a list or of arithmetic in prose.
_JOINT = (
    r"(?:[ \t$~\\,;!&|*+×·÷-]|\\(?:cdot|times|div|over|pm|q?quad|text\s*\{[^{}]*\}))*"
    r"(?:(?:and|or|plus|minus|times)[ \t$~\\]*)?"
)
_JOINED_BEFORE = re.compile(rf"[0-9]{_JOINT}\Z|\b(?:[Mm]inus|[Nn]egative)[ \t$~\\({{]*\Z")
_JOINED_AFTER = re.compile(rf"\^|{_JOINT}[0-9]")
# A unit if the truth has it. In an answer to another truth it changes the number.
_SCALE = re.compile(r"[0-9][ ~\\]*\\(?:text\w*|mbox)\s*\{\s*(dozen|hundred|thousand|[mb]illion)\b")
_APPROXIMATE = re.compile(r"\\approx(?![A-Za-z])|≈")
# Notation that the parser does not know, or misreads: it takes 1 1/2 for (1 + 1)/2.
_MIXED = re.compile(r"(?<![0-9.,/])([0-9]+) +([0-9]+)/([0-9]+)(?![0-9/])")
_ROOT = re.compile(r"([√∛∜])\s*(?:\(([^()]*)\)|\{([^{}]*)\}|([0-9]+(?:\.[0-9]+)?|[A-Za-z]))")
_ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
_BARE_ROOT = re.compile(r"(?<![\\A-Za-z])sqrt(?=\s*\{)")
_POWER = re.compile(r"(?<=[A-Za-z0-9)\]}])\*\*(?=[A-Za-z0-9({-])")
_EMPHASIS = re.compile(r"\A\s*(\*{1,3}|__)(?!\s)([^*]+)(?<!\s)\1\.?\s*\Z")
_LEAD = re.compile(
    r"\A\s*(?:(?:so|thus|hence|therefore|then|answer(?: is)?)\b[:,]?\s*)+(?=\S)", re.IGNORECASE
)
# The letter of a choice, as a truth and as an answer.
_CHOICE = re.compile(r"\(?([A-Z])\)?")
_CHOSEN = re.compile(
    r"(?:.*\b(?:[Ii]s|[Aa]nswer|[Cc]hoice|[Oo]ption)\b:?\s+)?\(?([A-Z])(?:[).:]+(?:\s(?!.*\b[A-H]\b).*)?)?",
    re.DOTALL,
)
# Choices that are given as the answer, and options that are listed without a text.
_GIVEN = re.compile(
    r"\b(?:[Ii]s|[Aa]nswer)\b:?\s+(?:[Oo]ption |[Cc]hoice )?\(?([A-Z])\)?(?=\s*(?:[.,;\n]|\Z|or\b|and\b))"
)
_OPTION = re.compile(r"\b(?:[Cc]hoice|[Oo]ption)\s+\(?([A-Z])\)?(?=\s*(?:[,;.]?\s*\Z|[,;]|or\b|and\b))")
_UNDONE = (ExprWithLimits, sympy.Derivative, sympy.Limit)
_SET_OPERATIONS = (sympy.Union, sympy.Intersection, sympy.Complement)
# The patterns by which math_verify finds an expression, in groups of equal priority.
_PATTERNS: dict[int, list[re.Pattern[str]]] = {}
for _group, _ in math_verify.parser.get_extraction_regexes(
    [math_verify.LatexExtractionConfig(), math_verify.ExprExtractionConfig()]
):
    for _pattern, _priority in _group:
        _PATTERNS.setdefault(_priority, []).append(_pattern)


class _Converter(latex2sympy._Latex2Sympy):
    """Converter that refuses numbers side by side, which latex2sympy adds. Only 2 1/2 is a mixed number."""

    def convert_postfix_list(self, arr: list[Any], i: int = 0) -> Any:
        value = super().convert_postfix_list(arr, i)
        factors = len(arr) - i
        # A product is not evaluated, so only a sum can be a number here.
        if factors > 1 and isinstance(value, sympy.Rational) and (factors > 2 or value.is_Integer):
            raise ValueError("numbers side by side")
        return value


latex2sympy._Latex2Sympy = _Converter


def prepare(_: Any) -> None:
    """Let the parser learn the usual forms of an answer."""
    for text in SAMPLES:
        # With the full stop the two are not the same text, so both are parsed.
        run({"answer": f"{text}.", "truth": text})


def run(payload: dict[str, str]) -> float:
    """Compare an answer with the truth.

    Args:
        payload: mapping with ``answer`` (a short answer or the whole completion) and ``truth`` (LaTeX).

    Returns:
        1.0 if the two are mathematically equal and the answer is evaluated as far as the truth, else 0.0.

    Raises:
        ValueError: the truth cannot be parsed.
    """
    text, truth_text = payload["answer"], payload["truth"]
    text = after_last(text).strip() or text
    # Of 1/3 ≈ 0.33 the exact number is the truth.
    exact = _APPROXIMATE.split(truth_text)[0].strip()
    if re.search("[0-9]", exact) and not re.search("[A-Za-z]", _NO_WORD.sub("", exact)):
        truth_text = exact
    if text.split() == truth_text.split() != []:
        return 1.0
    choice = _CHOICE.fullmatch(_letters(truth_text))
    if choice:
        letters = _letters(text)[-500:]
        chosen = _CHOSEN.fullmatch(letters)
        if chosen is not None:
            options = set(_GIVEN.findall(letters) or _OPTION.findall(letters))
            return float(chosen[1] == choice[1] and len(options) < 2)
    scale = _SCALE.search(truth_text)
    if scale:
        text, truth_text = text.replace(scale[1], ""), truth_text.replace(scale[1], "")
    time = clock.of_truth(truth_text)
    if time is not None:
        return float(clock.same(time, clock.read(text)))
    number = written.of_truth(truth_text)
    truth: list[Any] = []
    if number is None:
        truth = _parse(truth_text)
        if not truth:
            raise ValueError(f"math_verify cannot parse the truth {truth_text!r}")
        # The parser removes units.
        number = written.of_truth(truth[-1]) if isinstance(truth[-1], str) else None
    words = _WORD.findall(_NO_WORD.sub(" ", text))
    prose = len(words) >= _PROSE
    if number is not None:
        answer_number = _written(text, prose)
        return float(answer_number is not None and answer_number.answers(number))
    if any(isinstance(part, sympy.Basic) and part.has(sympy.zoo, sympy.nan) for part in truth):
        return 0.0  # Nothing equals a truth such as 1/0.
    decimal = written.with_comma(truth_text)
    if decimal is not None:
        answer_number = _written(text, prose)
        if answer_number is not None and answer_number.answers(decimal):
            return 1.0
    answer = _parse(text, prose)
    if not any(_has_unevaluated(part) for part in truth):
        equation = any(isinstance(part, sympy.core.relational.Relational) for part in truth)
        names = any(part.free_symbols for part in truth if isinstance(part, sympy.Basic))
        answer = _evaluated(answer, equation, names)
    # math_verify's own time limits use signals. They are off, because the pool has a time limit. An error
    # must not count as a wrong answer.
    return float(math_verify.verify(truth, answer, timeout_seconds=None, raise_on_error=True))


def _letters(text: str) -> str:
    r"""Return a text without boxes, dollar signs and fonts such as ``\text{}``."""
    text = extract_boxed_content(text, mode="last")
    return re.sub(r"\\(?:text|math)[a-z]*(?=\s*\{)|[{}$*]", "", text).strip()


def _written(text: str, prose: bool) -> written.Written | None:
    """Return the number that an answer writes out.

    Of a text with several numbers, it is the one in the box, in prose and formulas the one that math_verify
    takes.
    """
    boxed = _BOX.search(text)
    if not boxed and written.hedges(text):
        return None
    number = None if boxed else written.read(text)
    if number is None and (boxed or prose or (_HAS_MATH.search(text) and "\n" not in text.strip())):
        return written.read(_taken(numbers.plain(text)))
    return number


def _taken(text: str) -> str:
    """Return the source text of the expression that math_verify takes from a text; empty if there is none.

    It is the last box, or else the rightmost match of the patterns with the highest priority. Matches
    without digits and numbers that are joined to another one, or changed by a word, are not taken.
    """
    for priority, patterns in sorted(_PATTERNS.items()):
        if priority > 0 and _BOX.search(text):
            return str(extract_boxed_content(text, mode="last"))
        spans = []
        for match in itertools.chain.from_iterable(pattern.finditer(text) for pattern in patterns):
            parts = [match.span(name) for name, part in match.groupdict().items() if part]
            start, end = min(parts)[0], max(end for _, end in parts)
            if any(map(str.isdigit, text[start:end])):
                spans.append((start, end))
        if spans:
            start, end = max(spans, key=lambda span: (span[1], -span[0]))
            before = text[max(0, start - 50) : start]
            joined = _JOINED_BEFORE.search(before) or _JOINED_AFTER.match(text, end)
            changed = written.CHANGES_NEXT.search(before) or written.CHANGES_PREVIOUS.match(text, end)
            return "" if joined or changed else text[start:end]
    return ""


def _parse(text: str, prose: bool = False) -> list[Any]:
    """Parse the expressions in a text. The source text of each expression follows it in the list.

    Bare LaTeX is first parsed as a formula. Prose is not, because its letters would become factors.
    """
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", numbers.plain(text).replace("∞", r"\infty "))
    text = _ROOT.sub(lambda match: f"{_ROOTS[match[1]]}{{{match[2] or match[3] or match[4]}}}", text)
    text = _EMPHASIS.sub(r"\2", text)
    text = _LEAD.sub("", _BARE_ROOT.sub(r"\\sqrt", _POWER.sub("^", text)))
    alone = not _HAS_MATH.search(text) and len(text) <= 1_000
    formula = f"${text.rstrip(' .')}$"  # A full stop is no part of it.
    parts: list[Any] = []
    if alone and not prose:
        parts = math_verify.parse(formula, parsing_timeout=None)
    parts = parts or math_verify.parse(text, parsing_timeout=None)
    if alone and prose and not parts:
        parts = math_verify.parse(formula, parsing_timeout=None)
    return [_ascending(part) for part in parts]


def _ascending(part: Any) -> Any:
    """Return 3 > x > 1 as 1 < x < 3, and everything else as it is."""
    falling = sympy.StrictGreaterThan | sympy.GreaterThan
    if isinstance(part, And) and all(isinstance(link, falling) for link in part.args):
        return And(*(link.reversed for link in reversed(part._unsorted_args)))
    return part


def _evaluated(parts: list[Any], equation: bool, names: bool) -> list[Any]:
    """Return the fully evaluated expressions of an answer.

    Args:
        parts: the answer as parsed by :func:`_parse`.
        equation: whether the truth is an equation. If not, the last evaluated side of an equation is taken.
        names: whether the truth has symbols. If not, a side with symbols only names the answer and is
            ignored.
    """
    kept: list[Any] = []
    for part in parts:
        if isinstance(part, sympy.FiniteSet) and any(isinstance(item, And) for item in part.args):
            part = part.func(*map(_ends, part._unsorted_args))
        sides = _sides(part)
        if equation:
            part, sides = _ends(part), []
        done = [side for side in sides if not _has_unevaluated(side)]
        if sides:
            kept += [side for side in done if names or not side.free_symbols][-1:]
        elif not _has_unevaluated(part):
            kept.append(part)
    return kept


def _ends(part: Any) -> Any:
    """Return x = 4 * 8 = 32 and 4 * 8 = 32 = x as x = 32, 4 * 8 = 32 as 32, and everything else as it is."""
    sides = _sides(part)
    if len(sides) > 2 and isinstance(sides[-1], sympy.Symbol) and not isinstance(sides[0], sympy.Symbol):
        sides.reverse()
    done = [side for side in sides if not _has_unevaluated(side)]
    if len(sides) > 2 and done and sides[0] != done[-1]:
        return sympy.Eq(sides[0], done[-1], evaluate=False)
    if done and not any(side.free_symbols for side in sides):
        return done[-1]
    return part


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


def _has_unevaluated(part: Any) -> bool:
    """Whether an expression has arithmetic on numbers that should have been evaluated. Text has not."""
    if not isinstance(part, sympy.Basic):
        return False
    return any(_is_unevaluated(node) for node in sympy.preorder_traversal(part))


def _is_unevaluated(node: Any) -> bool:
    if isinstance(node, _UNDONE):
        return True
    if isinstance(node, _SET_OPERATIONS):
        return all(isinstance(item, sympy.FiniteSet) for item in node.args)
    if isinstance(node, sympy.Add):
        constant = [item for item in node.args if not item.free_symbols]
        # Evaluation leaves fewer terms. It does not for 1 + sqrt(2).
        return len(constant) > 1 and len(sympy.Add.make_args(sympy.Add(*constant).doit())) < len(constant)
    if isinstance(node, sympy.Mul):
        # A quotient of numbers is a fraction.
        return len([item for item in node.args if _is_number(item) and abs(item) != 1]) > 1
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
