r"""Parse numbers in the notations of people and models to exact fractions.

Numbers: ``1,234``, ``$5.00``, ``5.``, ``.5``, ``-3``, ``−3``, ``1/2``, ``2 1/2``, ``½``, ``0.50``,
``50%``, ``3 km``, ``1.5e3``, ``1{,}234``, ``\$5``, ``\boxed{5}``, ``\frac{1}{2}``, ``2\frac{1}{2}``. Percent
signs, currency signs and units are dropped: 50% is 50. Digits may be of any script. Not numbers: ``1.2.3``,
``3:00``, ``12/25/2020``, ``CO2``, ``10^3``, ``10³``. A quotient that is a whole number, such as ``144/2``, is
a division left undone and counts as two numbers.

The scan is linear in the text and ignores numbers longer than 64 characters.
"""

from __future__ import annotations

import collections
import re
import unicodedata
from collections.abc import Iterator
from fractions import Fraction

_MAX_CHARS = 64
_MAX_CANDIDATES = 1_000
#: Characters at the end of a text that are searched for its last number, one size after the other. None
#: searches the whole text.
_WINDOWS = (2_000, 50_000, None)


class _Characters(dict[int, str]):
    """What replaces a character. Characters are added when they are first met."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        digit = unicodedata.decimal(char, None)
        if digit is not None:
            char = str(digit)
        elif unicodedata.decomposition(char).startswith("<fraction>"):
            char = " " + unicodedata.normalize("NFKC", char).replace("⁄", "/")
        elif unicodedata.category(char) == "Zs":
            char = " "
        self[code] = char
        return char


_CHARACTERS = _Characters(
    {ord(char): "-" for char in "−‒–﹣－"}
    | {ord(char): "/" for char in "⁄∕／"}
    | {ord("，"): ",", ord("٬"): ",", ord("．"): ".", ord("٫"): ".", ord("％"): "%", ord("٪"): "%"}
)
_RAISED_FRACTION = re.compile("[⁰¹²³⁴-⁹]+[⁄∕/][₀-₉]+")
_RAISED = re.compile("[⁰¹²³⁴-⁹⁺⁻ⁿ]+")
_LOWERED = re.compile("[₀-₉]+")

_RUN = r"(?:[0-9][0-9.,]*+|\.[0-9][0-9.,]*+)"
#: A piece that may be a number. Possessive quantifiers match a whole run of digits, dots and commas, and
#: :func:`_split_run` interprets it.
_PIECE = re.compile(
    rf"""
      (?:(?P<whole>[0-9]++)[ ]?)?
      \\[dtc]?frac[ ]?(?:\{{[ ]?(?P<top>-?[0-9]{{1,20}})[ ]?\}}[ ]?\{{[ ]?(?P<bottom>[0-9]{{1,20}})[ ]?\}}
                       |(?P<top1>[0-9])[ ]?(?P<bottom1>[0-9]))
    | (?P<mixed>[0-9]++)[ ](?P<over>[0-9]++)/(?P<under>[0-9]++)
    | (?P<run>{_RUN})(?:[eE](?P<exponent>[-+]?[0-9]{{1,3}})(?![0-9A-Za-z]))?(?:[ ]?/[
    ]?(?P<denominator>{_RUN}))? """,
    re.VERBOSE,
)
_DECIMAL = re.compile(r"[0-9]*\.?[0-9]*")
_GROUPED = re.compile(r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,2}(?:,[0-9]{2})+,[0-9]{3})(?:\.[0-9]*)?")
#: A sign before a number, with an optional currency sign between them. Group 1 is the character before it.
_SIGN = re.compile(r"(^|.)([-+])[$€£¥]?$", re.DOTALL)
_CURRENCY_SIGN = re.compile(r"(^|.)\\?[$€£¥][ ]?([-+])$", re.DOTALL)
#: LaTeX that does not affect the value.
_NOISE = re.compile(r"\{,\}|\\[,;:! ]|\\left|\\right|\\(?=[$%#&])|\\(?:text|mathrm|textbf|mathbf)(?=\s?\{)")
_OTHER_COMMAND = re.compile(r"\\(?!(?:[dtc]?frac|f?boxed|[()\[\]])(?![A-Za-z]))[A-Za-z]")


def only(text: str) -> Fraction | None:
    """Return the only number in a short answer. Units and words are ignored.

    Args:
        text: short answer, at most 200 characters.

    Returns:
        The number, or None if the text is longer or does not have exactly one number.
    """
    if len(text) > 200:
        return None
    text = clean(text)
    if _OTHER_COMMAND.search(text):
        return None  # \sqrt{2} is not 2
    text = re.sub(
        r"^\s*([-+])\s+(?=[$0-9.\\])", r"\1", text
    )  # the sign of "- 3", when nothing stands before it
    values = list(_numbers(text))
    return values[0] if len(values) == 1 else None


def last(text: str) -> Fraction | None:
    """Return the last number in the text, or None. At most the last 1,000 candidates are tried."""
    for size in _WINDOWS:
        window = clean(text if size is None else text[-size:])
        whole = size is None or size >= len(text)
        candidates = collections.deque(_PIECE.finditer(window), maxlen=_MAX_CANDIDATES)
        while candidates:
            piece = candidates.pop()
            if not whole and piece.start() < 2 * _MAX_CHARS:
                break  # it may have begun before the window
            values = _values(window, piece)
            if values:
                return values[-1]
        if whole:
            break
    return None


def same(left: str, right: str) -> bool:
    """Whether two short answers are the same number, or the same text if one of them is not a number."""
    a, b = only(left), only(right)
    if a is not None and b is not None:
        return a == b
    return " ".join(left.casefold().split()) == " ".join(right.casefold().split())


def plain(text: str) -> str:
    """Normalize minus signs, digits of all scripts, fraction characters, and spaces. 10³ becomes 10^{3}."""
    text = _RAISED_FRACTION.sub(lambda match: " " + _level(match), text)
    text = _RAISED.sub(lambda match: f"^{{{_level(match)}}}", text)
    text = _LOWERED.sub(lambda match: f"_{{{_level(match)}}}", text)
    return text.translate(_CHARACTERS)


def _level(match: re.Match[str]) -> str:
    return unicodedata.normalize("NFKC", match[0])


def clean(text: str) -> str:
    """Normalize as :func:`plain`, and remove LaTeX that does not affect the value."""
    return _NOISE.sub(_noise, plain(text))


def _noise(match: re.Match[str]) -> str:
    return "," if match.group() == "{,}" else ""


def _numbers(text: str) -> Iterator[Fraction]:
    for piece in _PIECE.finditer(text):
        yield from _values(text, piece)


def _values(text: str, piece: re.Match[str]) -> list[Fraction]:
    """Return the numbers in one piece of a text: none, one, or several ("1,2,3" is a list)."""
    start, end = piece.span()
    if end - start > _MAX_CHARS or not _stands_alone(text, start, end):
        return []
    sign = _sign(text[max(0, start - 4) : start])
    if piece["run"] is not None:
        values = _run_values(piece)
    elif piece["mixed"] is not None:
        values = _mixed(piece["mixed"], piece["over"], piece["under"])
    else:
        top, bottom = piece["top"] or piece["top1"], piece["bottom"] or piece["bottom1"]
        values = _mixed(piece["whole"], top, bottom)
    return [sign * values[0], *values[1:]] if values else []


def _run_values(piece: re.Match[str]) -> list[Fraction]:
    run, exponent, denominator = piece["run"], piece["exponent"], piece["denominator"]
    values = _split_run(run)
    if exponent is not None and values:
        values[-1] *= Fraction(10) ** int(exponent)
    if denominator is not None and values:
        below = _split_run(denominator)
        if not below or below[0] == 0:
            return []
        values = [*values[:-1], *_quotient(values[-1], below[0]), *below[1:]]
    return values


def _split_run(run: str) -> list[Fraction]:
    """Return the numbers in a run of digits, dots and commas."""
    run = run.rstrip(".,")
    if _GROUPED.fullmatch(run):
        return [Fraction(run.replace(",", ""))]
    parts = [part.rstrip(".") for part in run.split(",")]
    if not all(_DECIMAL.fullmatch(part) for part in parts):
        return []  # 1.2.3
    return [Fraction(part) for part in parts if part]


def _quotient(above: Fraction, below: Fraction) -> list[Fraction]:
    """Return a fraction as one number, and a division with a whole result as its two numbers."""
    value = above / below
    return [above, below] if value.denominator == 1 else [value]


def _mixed(whole: str | None, top: str, bottom: str) -> list[Fraction]:
    """``2 1/2`` is one number; ``2 3/2`` is two."""
    if int(bottom) == 0:
        return []
    value = Fraction(int(top), int(bottom))
    if whole is None:
        return _quotient(Fraction(int(top)), Fraction(int(bottom)))
    return [int(whole) + value] if 0 < value < 1 else [Fraction(int(whole)), value]


def _stands_alone(text: str, start: int, end: int) -> bool:
    """Whether the piece is a number and not part of a word, a date, a time, a path or a power."""
    before, after = text[start - 1 : start], text[end : end + 1]
    if (
        before == "_"
        or (before.isalpha() and not _is_command_end(text, start))
        or (before in ("^", "/") and before)
    ):
        return False
    if text[start - 2 : start] in ("^{", "^-", "_{"):
        return False
    if (before == ":" and text[start - 2 : start - 1].isdigit()) or (
        after == ":" and text[end + 1 : end + 2].isdigit()
    ):
        return False
    return not (after == "^" or (after == "/" and text[end + 1 : end + 2].isdigit()))


def _is_command_end(text: str, start: int) -> bool:
    r"""Whether the letters before a number are a LaTeX command, as in ``\boxed 5``."""
    return re.search(r"\\f?boxed$", text[max(0, start - 8) : start]) is not None


def _sign(before: str) -> int:
    match = _SIGN.search(before) or _CURRENCY_SIGN.search(before)
    if match is None or match[2] == "+":
        return 1
    # "10-3" and "2)-1" are subtractions. A sign follows a space, an opening bracket, an operator or nothing.
    return 1 if match[1].isalnum() or (match[1] in (")", "]", "}") and match[1]) else -1
