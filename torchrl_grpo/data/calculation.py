"""The calculation that a question asks for, if it asks for nothing else."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

# A longer text is no short question about a calculation.
_LONGEST = 1_000
# Words that say nothing of what is calculated.
_FILLER_WORDS = """
    a an and answer answers arithmetic calculate calculation can compute could determine do does equal equals
    evaluate exact expression final find following for from give given how i in is it its just let me much
    number only out please problem provide q question reply respond result s simplify single solution solve
    state task tell the this to us value what which with work write you your add subtract multiply
    divide sum product difference quotient of
"""
_NUMERALS = """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen twenty
"""
_FILLER = frozenset(_FILLER_WORDS.split())
_NUMBER_WORDS = {word: str(value) for value, word in enumerate(_NUMERALS.split())}
_NUMBER = r"(-?\d+(?:\.\d+)?)"
# Each pattern is replaced by a calculation in signs, in this order.
_IN_SIGNS: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(pattern), signs)
    for pattern, signs in (
        (rf"\b({'|'.join(_NUMBER_WORDS)})\b", lambda match: _NUMBER_WORDS[match[0]]),
        (r"\\(?:left|right)\b|\\[()\[\],;!]|\\?\$", " "),
        (r"(?<=\d),(?=\d{3}(?!\d))", ""),
        (r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"((\1)/(\2))"),
        (r"\^\{([^{}]*)\}", r"^(\1)"),
        (r"\\times\b|\\cdot\b|\b(?:times|multiplied by)\b|(?<=[\d)])\s*x\s*(?=[\d(-])|[×·⋅∙]", "*"),
        (r"\\div\b|\bdivided by\b|[÷∕⁄]", "/"),
        (r"\bplus\b", "+"),
        (r"\bminus\b|[−–]", "-"),
        (rf"\b(?:sum of|add) {_NUMBER} (?:and|to|with) {_NUMBER}", r"\1 + \2"),
        (rf"\bdifference (?:of|between) {_NUMBER} and {_NUMBER}", r"\1 - \2"),
        (rf"\bsubtract {_NUMBER} from {_NUMBER}", r"\2 - \1"),
        (rf"\b(?:product of|multiply) {_NUMBER} (?:and|by|with) {_NUMBER}", r"\1 * \2"),
        (rf"\b(?:quotient of|divide) {_NUMBER} (?:and|by) {_NUMBER}", r"\1 / \2"),
        (r"(?<=[\d)])\s*(?=\()", "*"),
    )
]
# Words that the patterns replace. A question with any other word asks for more than a calculation.
_SIGN_WORDS = "times multiplied by divided plus minus between x left right frac dfrac tfrac cdot div"
_KNOWN = _FILLER.union(_SIGN_WORDS.split(), _NUMBER_WORDS)
_WORD = re.compile(r"[^\W\d_]+")
_RUN = re.compile(r"[-+*/^().\s]*\d[-+*/^().\d\s]*")
_PUNCTUATION = " \t\n.?!:,;='\"()`_*-"


def calculation_in(question: str) -> str | None:
    """Return the calculation that a question asks for; None if it asks for something else, or for more."""
    if len(question) > _LONGEST:
        return None
    text = unicodedata.normalize("NFKC", question).casefold()
    if any(word not in _KNOWN for word in _WORD.findall(text)):
        return None
    for pattern, signs in _IN_SIGNS:
        text = pattern.sub(signs, text)
    runs = _RUN.findall(text)
    rest = _WORD.sub(lambda word: "" if word[0] in _FILLER else "?x", _RUN.sub(" ", text))
    if len(runs) != 1 or rest.strip(_PUNCTUATION):
        return None
    return str(runs[0]).strip(" .\n")
