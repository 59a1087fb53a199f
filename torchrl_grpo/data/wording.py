"""The words of a question, without what changes from one copy of a data set to the next."""

from __future__ import annotations

import json
import os.path
import re
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

# What fewer rows have in common may be chance, and what is left of a short question may be in any other.
_FEWEST_ROWS = 20
_FEWEST_WORDS = 8
_ALIKE = str.maketrans(
    dict.fromkeys("\u2018\u2019\u2032\u00b4`", "'")
    | dict.fromkeys('"\u201c\u201d\u201e\u00ab\u00bb', " ")
    | dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212", "-")
)
# Commas of thousands, dollars, delimiters of formulas, and punctuation at the end of a word. Elsewhere a sign
# may be part of a formula or a board.
_DROPPED = re.compile(
    r"(?<=\d),(?=\d{3}(?!\d))|\\?\$(?=[\w.\\({-])|(?<=[\w)}%])\\?\$|\\[()\[\]]"
    r"|(?<=[\w)\]}'%$])[.:;?]+(?=[\s'()]|$)|(?<=[^\W\d])!+(?=[\s'()]|$)"
)
_TOKEN = re.compile(r"\d+(?:\.\d+)?|[^\W\d_]+|[^\s]")


class Frame(NamedTuple):
    """What all questions of a source begin and end with, such as a system prompt or an instruction."""

    start: str
    end: str

    def bare(self, question: str) -> str | None:
        """Return the words of a question without the frame; None if it has none, or few words in it."""
        text = _texts_of(question)
        inner = text.removeprefix(self.start).removesuffix(self.end)
        inside = "" if inner == text else words(inner)
        return inside if inside.count(" ") >= _FEWEST_WORDS - 1 else None


def frame(questions: Sequence[str]) -> Frame:
    """Return the frame of the questions of a source; an empty one if they are few."""
    if len(questions) < _FEWEST_ROWS:
        return Frame("", "")
    texts = [_texts_of(question) for question in questions]
    start = re.sub(r"[^\s:>]*$", "", os.path.commonprefix(texts))  # noqa: RUF071
    backwards = [text.removeprefix(start)[::-1] for text in texts]
    end = re.sub(r"\S*$", "", os.path.commonprefix(backwards))  # noqa: RUF071
    return Frame(start, end[::-1])


def words(question: str) -> str:
    """Return the words, numbers and signs of a question, in one case, spelling and spacing.

    Signs that may mean something stay: ``3 - 4``, ``3 + 4``, ``3.4`` and ``34`` differ.
    """
    text = _texts_of(question)
    if not text.isascii():
        text = plain_characters(text.translate(_ALIKE))
        text = "".join(char for char in text if unicodedata.category(char) != "Cf")
    text = text.translate(_ALIKE).casefold()
    text = _DROPPED.sub(lambda match: "" if match[0] == "," else " ", text)
    return " ".join(token for token in _TOKEN.findall(text) if token != ",")


def plain_characters(text: str) -> str:
    """Return a text in NFKC, with a space before raised numbers and fractions: 2\u00b2 does not become 22."""
    apart = (f" {char}" if unicodedata.category(char) == "No" else char for char in text)
    return unicodedata.normalize("NFKC", "".join(apart))


def _texts_of(question: str) -> str:
    """Return the texts of a conversation, which is written as JSON, or the question itself."""
    if not question.startswith('[["'):
        return question
    try:
        return "\n".join(f"{role}: {content}" for role, content in json.loads(question))
    except (ValueError, TypeError):
        return question  # a question that only looks like a conversation
