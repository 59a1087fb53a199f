"""The calculation that a question asks for, if it asks for nothing else.

:mod:`~torchrl_grpo.data.identity` asks whether two questions are the same calculation in other words. A
question without a calculation is compared as text, which is always safe. So whatever can be read in two ways
is none.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from torchrl_grpo.data.wording import plain_characters

# A longer text is no short question about a calculation.
_LONGEST = 1_000
# Words that say nothing of what is calculated.
_FILLER_WORDS = """
    a an and answer answers arithmetic calculate calculation can compute could determine do does equal equals
    evaluate exact expression final find following for from give given how i in is it its just let me much
    number only out please problem provide q question reply respond result s simplify single solution solve
    state task tell the this to us value what which with work write you your of
"""
# Words that say what to calculate, and that a pattern has to replace: "add 5 -3" is not "subtract 5 -3".
_OPERATOR_WORDS = "add subtract multiply divide sum product difference quotient"
_NUMERALS = """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen twenty
"""
_FILLER = frozenset(_FILLER_WORDS.split())
_NUMBER_WORDS = {word: value for value, word in enumerate(_NUMERALS.split())}
_NUMBER = r"(-?\d+(?:\.\d+)?)"
# After "add 3 and 4", an operator may belong to the 4 or to the sum.
_LAST_NUMBER = _NUMBER + r"\b(?!\.?\d|\s*[-+*/^(])"
# Each pattern is replaced by a calculation in signs, in this order.
_IN_SIGNS: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(pattern), signs)
    for pattern, signs in (
        (
            rf"\b(twenty[ -])?({'|'.join(_NUMBER_WORDS)})\b",
            lambda match: str((20 if match[1] else 0) + _NUMBER_WORDS[match[2]]),
        ),
        (r"\\(?:left|right)\b|\\[()\[\],;!]|\\?\$", " "),
        (r"(?<=\d),(?=\d{3}(?!\d))", ""),
        # Before the next pattern adds brackets: the 2 in front of a fraction is part of a mixed number.
        (r"(?<=[\d)])\s*(?=\()", "*"),
        (r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"((\1)/(\2))"),
        (r"\^\{([^{}]*)\}", r"^(\1)"),
        (r"\\times\b|\\cdot\b|\b(?:times|multiplied by)\b|(?<=[\d)])\s*x\s*(?=[\d(-])|[×·⋅∙]", "*"),
        (r"\\div\b|\bdivided by\b|[÷∕⁄]", "/"),
        (r"\bplus\b", "+"),
        (r"\bminus\b|[−–]", "-"),
        (rf"\b(?:sum of|add) {_NUMBER} (?:and|to|with) {_LAST_NUMBER}", r"(\1 + \2)"),
        (rf"\bdifference (?:of|between) {_NUMBER} and {_LAST_NUMBER}", r"(\1 - \2)"),
        (rf"\bsubtract {_NUMBER} from {_LAST_NUMBER}", r"(\2 - \1)"),
        (rf"\b(?:product of|multiply) {_NUMBER} (?:and|by|with) {_LAST_NUMBER}", r"(\1 * \2)"),
        (rf"\b(?:quotient of|divide) {_NUMBER} (?:and|by) {_LAST_NUMBER}", r"(\1 / \2)"),
    )
]
# Words that the patterns replace. A question with any other word asks for more than a calculation.
_SIGN_WORDS = "times multiplied by divided plus minus between x left right frac dfrac tfrac cdot div"
_KNOWN = _FILLER.union(_OPERATOR_WORDS.split(), _SIGN_WORDS.split(), _NUMBER_WORDS)
_WORD = re.compile(r"[^\W\d_]+")
_CALCULATION = re.compile(r"[-+*/^().\s]*\d[-+*/^().\d\s]*")
_PUNCTUATION = " \t\n.?!:,;='\"()`_*-"


def calculation_in(question: str) -> str | None:
    """Return the calculation that a question asks for, such as ``(3 + 4)``.

    None if it asks for something else, or for more.
    """
    if len(question) > _LONGEST:
        return None
    text = plain_characters(question).casefold()
    if any(word not in _KNOWN for word in _WORD.findall(text)):
        return None
    for pattern, signs in _IN_SIGNS:
        text = pattern.sub(signs, text)
    calculations = _CALCULATION.findall(text)
    rest = _WORD.sub(lambda word: "" if word[0] in _FILLER else "x", _CALCULATION.sub(" ", text))
    if len(calculations) != 1 or rest.strip(_PUNCTUATION):
        return None
    return str(calculations[0]).strip(" .\n")
