r"""Read the one number that a short answer writes out.

A parser of mathematics accepts all texts with the right value, even work left undone: ``48 + 24``,
``\gcd(144, 72)``, or ``48 24``, which it adds like a mixed number. Here the number itself must be in the
text, with a unit, words or LaTeX around it. Of a chain of equations (``x = 4 * 8 = 32``) the last side that
is a number counts. Several numbers (``48, 24``, ``1 or 72``) are no answer, and neither is a quotient that is
a whole number (``144/2``). Nor is a number beside a word that changes it (``half of 144``, ``6 dozen``), or
one of several that a text equates or gives as the answer (``48 = 72``, ``x = 48`` and ``x = 72``).

Numbers are written as in :mod:`~torchrl_grpo.rewards.numbers`, or as ``1 000``, ``1'000``, ``1.000,99``,
``1000,99``, ``3:4``, ``0.\overline{3}`` or ``3 \times 10^5``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from torchrl_grpo.rewards import numbers

_MAX_CHARS = 200

_RUN = r"(?:[0-9][0-9.,]*+|(?<!\.)\.[0-9][0-9.,]*+)"
_ARGUMENT = rf"[ ]*(?:\{{[ ]*([-+]?{_RUN})[ ]*\}}|([0-9]))"
_LETTER = r"[^\W\d_]"
_UNIT = rf" *\{{[ {{]*({_LETTER}(?:{_LETTER}| )*)[ }}]*\}}"
#: Notation and what replaces it, in this order.
_NOTATION: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    # A calculation as in GSM8K's solutions, and a tag.
    (r"<<[^<>]*>>|</?[a-z]+>", " "),
    (r" *\{ *, *\} *|,\\! *", ","),
    (r"\\[,;:! ]|~|\\q?quad(?![A-Za-z])|\\+\s*\Z|\*{2,3}|_{2,3}|`|[^\S\n]", " "),
    (r"\\(?:left|right|displaystyle|boxed|fbox|(?:text|math|mbox)[a-z]*(?=\s*\{))(?![A-Za-z])", " "),
    (r"\\(?:rm|bf|it|bm|boldsymbol|therefore|textdollar|cent)(?![A-Za-z])", " "),
    # A condition, as in n = 72 (n > 0).
    (r"\( *[A-Za-z] *(?:[<>]=?|[≤≥≠]|\\[gl]eq?|\\neq?) *0 *\)", " "),
    (r"\\(?=[$%#&])", ""),
    (r"([-+]) ?\$ ?(?=[0-9.])", r"\1"),
    (r"\\[()\[\]]|\$", " "),
    (r"\^ ?\{? ?\\circ ?\}?|\\degree(?![A-Za-z])", "°"),
    # The power of a unit, as in m^2.
    (r"([A-Za-z]\}?) ?\^ ?(?:-?[1-4](?![0-9])|\{ ?-?[1-4] ?\})", r"\1"),
    # 10^1 is left, because 7.2 * 10^1 is work undone.
    (
        r"(?<![0-9.,])(?:([1-9](?:\.[0-9]+)?) *(?:[*×·x]|\\times|\\cdot) *)?10 *\^ *\{? *"
        r"(-[0-9]{1,3}|[2-9]|[1-9][0-9]{1,2})(?![0-9]) *\}?",
        lambda m: f"{m[1] or 1}e{m[2]}",
    ),
    (r" *\\(?:over|div)(?![A-Za-z]) *", "/"),
    (rf" *\\[dtc]?frac{_ARGUMENT}{_ARGUMENT}", lambda m: f" {m[1] or m[2]}/{m[3] or m[4]} "),
    # Units, as in kg·m and \frac{m}{s}.
    (rf"({_LETTER}[ }}]*)(?:[·⋅]|\\cdot(?![A-Za-z]))(?=[ {{]*{_LETTER})", r"\1 "),
    (rf" *\\[dtc]?frac{_UNIT}{_UNIT}", r" \1/\2 "),
    (r" +", " "),
    (r"(?<=[0-9]) ?\\operatorname(?= ?\{)", " "),
    # Emphasis. It is two spaces for the same reason as brackets.
    (r"(?<!\S)([*_])(?! )([^*_\n]+)(?<! )\1(?!\w)", r"  \2  "),
    (r"(?<![0-9.,/_])[0-9]{1,3}(?:['’_][0-9]{3})+(?![0-9_])", lambda m: re.sub("['’_]", "", m[0])),
    # 1.000,5 and 1.000.000, but not 1.000.
    (
        r"(?<![0-9.,/])[0-9]{1,3}(?:(?:\.[0-9]{3})+(?=,[0-9]+(?![.,]?[0-9]))|(?:\.[0-9]{3}){2,}(?![.,]?[0-9]))",
        lambda m: m[0].replace(".", ""),
    ),
    (r"([0-9]*)\.([0-9]*)\\(?:overline|bar) ?(?:\{ ?([0-9]{1,9}) ?\}|([0-9]))", lambda m: _repeating(m)),
    (
        r"(?<![0-9.,(\[{])(?:[0-9]+,(?:[0-9]{1,2}|[0-9]{4,})|(?:0|[0-9]{4,}),[0-9]+)(?![.,]?[0-9])",
        lambda m: m[0].replace(",", "."),
    ),
    # Two spaces, because the numbers in "2(1/2)" and "1(000)" are not parts of one number.
    (r"\\?[()\[\]{}]", "  "),
    (r"(?<![0-9.,/])[0-9]{1,3}(?: [0-9]{3})+(?!,?[0-9]| ?/)", lambda m: m[0].replace(" ", "")),
    # The space makes "x minus 5" a subtraction.
    (r"\b[Mm]inus +(?=[-+.]?[0-9])", "- "),
    (r"\b[Nn]egative +(?=[-+.]?[0-9])", "-"),
]
_REWRITE = [(re.compile(pattern), replacement) for pattern, replacement in _NOTATION]
_DIGIT = re.compile("[0-9]")
_ARROWS = r"=+>|->|→|⇒|\\(?:implies|to|(?:Long)?[Rr]ightarrow)(?![A-Za-z])"
_ARROW = re.compile(_ARROWS)
_LINK = re.compile(rf"{_ARROWS}|(?<![<>!])=+")
_ABOUT = re.compile(r"≈|\\approx(?![A-Za-z])")
_SEPARATOR = re.compile(r"[;&]|,(?![0-9])|\b(?:and|or)\b|(?<=[0-9]) [abcijknpqruvwxyz] ?(?==)")
#: Text around a number: no digits, commands and operators, except in words such as km/h, M&Ms and 30-minute.
_WORDS = (
    r"(?:[^0-9+*^=≠≤≥<>|\\√±×·÷&_∞α-λν-ω/-]|/(?=[ ]?[^\W\d_])|&(?=[^\W\d_])"
    r"|(?:(?<![^\s])[0-9]+)?-(?=[^\W\d_]{2}))*"
)
_SPELLED = (
    r"(?:an? )?(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|half|hundred|dozen|"
    r"(?:thir|four|fif|six|seven|eigh|nine)teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty)\b"
)
#: What changes the number after it, and what changes the number before it.
CHANGES_NEXT = re.compile(
    r"\b(?:half|twice|double|triple|dozen|root|(?:third|quarter|square|cube) of|sqrt|log|ln|exp|sin|cos|tan|"
    r"not|plus|times|(?:divided|multiplied) by|(?:hundred|thousand)(?: and)?)(?: of)?[ \t$~\\({]*\Z",
    re.IGNORECASE,
)
CHANGES_PREVIOUS = re.compile(
    r"[ \t$~\\)}]*(?:(?:pi|dozen|hundred|thousand|[mb]illion|squared|cubed|minus|plus)\b(?!-)|"
    r"(?:half|halves|thirds|fourths|fifths|tenths)\b(?![ -]\w)|"
    rf"(?:times|over|and|or|of|(?:divided|multiplied) by) {_SPELLED})",
    re.IGNORECASE,
)
_SIDE = re.compile(
    rf"""
    (?P<before>{_WORDS}?) (?<![^\W_]) (?P<sign>(?:[-+](?![-+])\s*)*)
    (?P<number>(?P<mixed>[0-9]+[ ][0-9]+[ ]?/[ ]?[0-9]+)
             | {_RUN}(?:[eE][-+]?[0-9]{{1,3}})?(?:\s*[/:÷]\s*-?{_RUN})?)
    (?![ ]*!)                                                               # 5! is a factorial
    (?![ ]?(?:[eijknqruvwxyzXYZ]|[abcxyz]{{2,3}})(?![^\W\d_]))              # 5x is a product
    (?P<percent>[ ]?(?:%|percent|pct))?
    (?P<after>{_WORDS})
    """,
    re.VERBOSE,
)


#: What an equation names, numbers given as the answer, and words that introduce a number.
_NAMED = re.compile(r"\s*([^\W\d][\w ]*?)\s*=")
_STATED = re.compile(
    rf"\banswer(?: is\b|\s*[:=])[:=\s]*([-+]?{_RUN})(?=[.,;]*(?:\s*\Z|\n|\s+(?:or|and|the)\b))", re.IGNORECASE
)
_INTRODUCED = re.compile(r".*\b(?:is|answer)\b:?", re.DOTALL)

#: A truth with words after the number, and one with a comma between digits.
_WITH_UNIT = re.compile(r"\\?\$?[-+]?[0-9][0-9.,/]* ((?:[A-Za-z]+(?:/[A-Za-z]+)? ?)+)")
_COMMA = re.compile(r"[-+]?[0-9]+,[0-9]+(?: ?\\?[$€£%])?")


@dataclass(frozen=True)
class Written:
    """A number in a text.

    Attributes:
        value: the number, without the percent sign.
        percent: whether a percent sign follows it.
        decimal: whether it has decimals, which may be rounded.
        words: text before and after it.
    """

    value: Fraction
    percent: bool
    decimal: bool
    words: tuple[str, str] = ("", "")

    def answers(self, truth: Written) -> bool:
        """Whether it is the number that a truth asks for.

        A percent sign may be a unit (10% for 10) or stand for hundredths (50% for 0.5). Rounding to six
        decimals is allowed.
        """
        pairs = [(self.value, truth.value)]
        if truth.percent and not self.percent:
            pairs.append((self.value, truth.value / 100))
        elif self.percent and not truth.percent and (truth.value.denominator > 1 or abs(truth.value) <= 1):
            pairs.append((self.value / 100, truth.value))
        rounded = self.decimal or truth.decimal
        return any(a == b or (rounded and round(a, 6) == round(b, 6) != 0) for a, b in pairs)

    def contradicts(self, other: Written) -> bool:
        """Whether it differs from another number by more than rounding."""
        rounded = self.decimal or other.decimal
        near = rounded and abs(self.value - other.value) <= Fraction(1, 100)
        return not (near or self.answers(other) or other.answers(self))


def read(text: str) -> Written | None:
    """Return the number that a text writes out.

    Args:
        text: short answer, at most 200 characters. The last line counts, and the others may only have
            equations.

    Returns:
        The number, or None if the text is longer, has none, has several, or leaves arithmetic undone.
    """
    if len(text) > _MAX_CHARS:
        return None
    text = _rewritten(text)
    if _contradicts_itself(text):
        return None
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines or any(_DIGIT.search(line) and "=" not in line for line in lines[:-1]):
        return None
    # Of x = 1/3 ≈ 0.3 the exact number counts.
    values = (_of_chain(chain) for chain in _ABOUT.split(lines[-1]))
    return next((number for number in values if number is not None), None)


def hedges(text: str) -> bool:
    """Whether a short text gives different numbers for the same thing, so that none of them is its answer."""
    return len(text) <= _MAX_CHARS and _contradicts_itself(_rewritten(text))


def of_truth(text: str) -> Written | None:
    """Return the number that a truth consists of, or None if it is anything else.

    Letters outside of LaTeX commands are symbols, unless they are words after the number. A comma that groups
    no thousands separates numbers.
    """
    bare = re.sub(
        r"\\(?:text\w*|mbox)\s*\{[^{}]*\}|\\[A-Za-z]+|\\!|\{,\}|(?<=[0-9])[eE](?=[-+]?[0-9])", " ", text
    )
    if re.search(r"[A-Za-z=]|,(?![0-9]{3}(?![0-9]))", bare):
        with_unit = _WITH_UNIT.fullmatch(text.strip())
        return read(text) if with_unit and not any(map(_is_product, with_unit[1].split())) else None
    tuple_or_set = "," in bare and re.search(r"[(\[]|\\\{", bare)
    return None if tuple_or_set else read(text)


def with_comma(text: str) -> Written | None:
    """Return the decimal number that a truth such as ``1,22`` may be. It may also be two numbers."""
    return read(text) if _COMMA.fullmatch(text.strip()) else None


def _rewritten(text: str) -> str:
    text = numbers.plain(text)
    for pattern, replacement in _REWRITE:
        text = pattern.sub(replacement, text)
    return text


def _contradicts_itself(text: str) -> bool:
    """Whether numbers with the same words are equated, or one name or the answer has different numbers."""
    same: dict[object, list[Written]] = {}
    for part in itertools.chain.from_iterable(map(_ABOUT.split, text.split("\n"))):
        # In 2x = 144 -> x = 72 the numbers belong to two equations, and in 48 -> 72 they are equated.
        for equation in _ARROW.split(part) if "=" in _ARROW.sub("", part) else [part]:
            sides = [number for number in map(_number, _LINK.split(equation)) if number is not None]
            for side in sides:
                before, after = side.words
                words = (_INTRODUCED.sub("", before).strip(), after.strip(" ."))
                same.setdefault((part, equation, *words), []).append(side)
            name = _NAMED.match(equation)
            if name and sides:
                same.setdefault(name[1], []).append(sides[-1])
    stated = (_number(value.rstrip(".,")) for value in _STATED.findall(text))
    same["answer is"] = [number for number in stated if number is not None]
    return any(number.contradicts(alike[0]) for alike in same.values() for number in alike[1:])


def _is_product(word: str) -> bool:
    """Whether a word may be symbols, whose letters are in order, or a function."""
    return len(word.strip("/")) < 3 or sorted(word) == list(word) or CHANGES_NEXT.match(word) is not None


def _repeating(match: re.Match[str]) -> str:
    """Return the fraction that equals a repeating decimal."""
    whole, start, period = match[1] or "0", match[2], match[3] or match[4]
    value = Fraction(int(whole + start), 1) + Fraction(int(period), 10 ** len(period) - 1)
    value /= 10 ** len(start)
    return f"{value.numerator}/{value.denominator}"


def _of_chain(chain: str) -> Written | None:
    first, *rest = _LINK.split(chain)
    if sum(bool(_DIGIT.search(part)) for part in _SEPARATOR.split("=".join(rest))) > 1:
        return None  # x = 48, y = 24
    values = (_number(side) for side in reversed([first, *rest]))
    return next((number for number in values if number is not None), None)


def _number(side: str) -> Written | None:
    match = _SIDE.fullmatch(side)
    if match is None or (" " in match["sign"] and match["before"].strip()):
        return None  # x - 5
    if CHANGES_NEXT.search(match["before"]) or CHANGES_PREVIOUS.match(match["after"]):
        return None
    number = match["number"]
    parts = [number] if match["mixed"] else re.split("[/:÷]", number)
    values = [value for value in map(numbers.only, parts) if value is not None]
    if len(values) < len(parts) or 0 in values[1:]:
        return None
    value = values[0]
    if len(values) > 1:
        value /= values[1]
        if value.denominator == 1:
            return None
    if match["sign"].count("-") % 2:
        value = -value
    decimal = "." in number or "e" in number.lower()
    return Written(value, match["percent"] is not None, decimal, (match["before"], match["after"]))
