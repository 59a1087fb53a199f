"""Compare times, scores and ratios of three: texts such as 12:00, 3:45 PM, 2:0 and 1:2:3.

They are not one number, and a parser of mathematics would divide. A truth such as 3:4 is left to the parser,
because it may be a quotient.
"""

from __future__ import annotations

import math
import re

from latex2sympy2_extended.math_normalization import extract_boxed_content

from torchrl_grpo.rewards import numbers

_TIME = re.compile(
    r"(?<![0-9.,:])([0-9]{1,9}(?: *: *[0-9]{1,9})+)(?![0-9:]|[.,][0-9])(?: *([ap])\.? ?m\b\.?)?",
    re.IGNORECASE,
)
#: Another half of the day after a time.
_OTHER_HALF = re.compile(r"\W*(?:(?:or|and)\W+)?[ap]\.? ?m\b", re.IGNORECASE)
_LATEX = re.compile(r"\\(?:text|math)[a-z]*(?=\s*\{)|\\[,;: ()\[\]]|[{}$~]")


def read(text: str) -> tuple[str, ...] | None:
    """Return the parts of the only time in a text; the last one is "a" (a.m.), "p" or empty.

    None if the text has no time, another number or both halves of the day. If it has boxes, the last one
    counts.
    """
    text = _clean(text)
    match = _TIME.search(text)
    if match is None or re.search("[0-9]", text[: match.start()] + text[match.end() :]):
        return None
    if match[2] and _OTHER_HALF.match(text, match.end()):
        return None
    return _parts(match)


def of_truth(text: str) -> tuple[str, ...] | None:
    """Return the parts of a truth that is a time and no quotient, or None."""
    match = _TIME.fullmatch(_clean(text).strip(" ."))
    if match is None:
        return None
    *values, half = parts = _parts(match)
    # A ratio is written in its lowest terms.
    reduced = math.gcd(int(values[0]), int(values[1])) == 1 and not values[1].startswith("0")
    return None if len(values) == 2 and reduced and not half else parts


def same(truth: tuple[str, ...], answer: tuple[str, ...] | None) -> bool:
    """Whether an answer has the time of a truth. If the truth has no a.m. or p.m., it may have either."""
    return answer is not None and answer[:-1] == truth[:-1] and truth[-1] in ("", answer[-1])


def _clean(text: str) -> str:
    text = extract_boxed_content(numbers.plain(text), mode="last")
    return _LATEX.sub(" ", text.replace(r"\!", "").replace("{:}", ":"))


def _parts(match: re.Match[str]) -> tuple[str, ...]:
    first, *rest = re.split(" *: *", match[1])
    return (str(int(first)), *rest, (match[2] or "").lower())
