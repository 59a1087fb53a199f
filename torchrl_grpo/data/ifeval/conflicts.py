"""Conflicts between instruction types, and between the arguments of compatible instructions.

Two types conflict if no response can satisfy both, or if the pair is ambiguous (for example, an exact number
of paragraphs across two separate responses). The benchmark combines types more freely, but a training prompt
that nobody can satisfy only adds noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from torchrl_grpo.data.ifeval.schema import ARGUMENTS, LESS_THAN

CAPITAL_WORDS = "change_case:capital_word_frequency"
CAPITAL = "change_case:english_capital"
LOWERCASE = "change_case:english_lowercase"
REPEAT = "combination:repeat_prompt"
TWO = "combination:two_responses"
PLACEHOLDERS = "detectable_content:number_placeholders"
POSTSCRIPT = "detectable_content:postscript"
CONSTRAINED = "detectable_format:constrained_response"
JSON = "detectable_format:json_format"
SECTIONS = "detectable_format:multiple_sections"
BULLETS = "detectable_format:number_bullet_lists"
HIGHLIGHTS = "detectable_format:number_highlighted_sections"
TITLE = "detectable_format:title"
EXISTENCE = "keywords:existence"
FORBIDDEN = "keywords:forbidden_words"
FREQUENCY = "keywords:frequency"
LETTER = "keywords:letter_frequency"
LANGUAGE = "language:response_language"
NTH_PARAGRAPH = "length_constraints:nth_paragraph_first_word"
PARAGRAPHS = "length_constraints:number_paragraphs"
SENTENCES = "length_constraints:number_sentences"
NUM_WORDS = "length_constraints:number_words"
NO_COMMA = "punctuation:no_comma"
ENDING = "startend:end_checker"
QUOTATION = "startend:quotation"

# Four restrictive types, and the types that each is compatible with.
_COMPATIBLE: dict[str, set[str]] = {
    # The repeated request is in mixed case and in English, and the writer cannot choose its length.
    REPEAT: {TITLE, BULLETS, HIGHLIGHTS, PLACEHOLDERS, POSTSCRIPT, ENDING, EXISTENCE},
    JSON: {CAPITAL, LOWERCASE, EXISTENCE, FORBIDDEN, FREQUENCY, LETTER, PLACEHOLDERS, NUM_WORDS},
    # Types that count English words, letters or sentences have no meaning in another language.
    LANGUAGE: {NO_COMMA, TITLE, BULLETS, HIGHLIGHTS, PARAGRAPHS, QUOTATION, TWO},
    CONSTRAINED: {TITLE, HIGHLIGHTS, EXISTENCE, FORBIDDEN, LETTER, NUM_WORDS, SENTENCES, NO_COMMA, QUOTATION},
}

# The other types, and the types that each conflicts with.
_INCOMPATIBLE: dict[str, set[str]] = {
    CAPITAL: {LOWERCASE, CAPITAL_WORDS, POSTSCRIPT, SECTIONS, ENDING},
    LOWERCASE: {CAPITAL_WORDS, POSTSCRIPT, SECTIONS, ENDING},
    TWO: {PARAGRAPHS, NTH_PARAGRAPH, SECTIONS, BULLETS, POSTSCRIPT, ENDING, QUOTATION},
    PARAGRAPHS: {NTH_PARAGRAPH, SECTIONS},
    NTH_PARAGRAPH: {SECTIONS, TITLE, POSTSCRIPT, BULLETS},
    ENDING: {POSTSCRIPT, QUOTATION, LETTER},
    NUM_WORDS: {SENTENCES},
}

# Types that ask for a number of parts, and the argument with that number. Each part needs a sentence.
_PARTS = {PARAGRAPHS: "num_paragraphs", SECTIONS: "num_sections", BULLETS: "num_bullets"}


def _conflict(first: str, second: str) -> bool:
    for instruction, other in ((first, second), (second, first)):
        if instruction in _COMPATIBLE and other not in _COMPATIBLE[instruction]:
            return True
        if other in _INCOMPATIBLE.get(instruction, ()):
            return True
    return False


#: All conflicting pairs of instruction types.
CONFLICTS: frozenset[frozenset[str]] = frozenset(
    frozenset(pair) for pair in combinations(ARGUMENTS, 2) if _conflict(*pair)
)


def clash(request: str, instructions: Sequence[tuple[str, dict[str, Any]]]) -> bool:
    """Whether the arguments of compatible instructions contradict each other or the request.

    Args:
        request: text of the writing task.
        instructions: pairs of instruction id and arguments.

    Returns:
        True if a required text contains a forbidden or rare one, if a keyword occurs twice among the
        arguments or already occurs in the request, or if the allowed number of sentences or capitalized
        words is too small for the required parts.
    """
    required: list[str] = []
    forbidden: list[str] = []
    rare_letters: list[tuple[str, int]] = []
    parts = 0
    sentences: int | None = None
    headings, capitals = 0, None
    for instruction, kwargs in instructions:
        if instruction == EXISTENCE:
            required += kwargs["keywords"]
        elif instruction == FORBIDDEN:
            forbidden += kwargs["forbidden_words"]
        elif instruction == FREQUENCY:
            (forbidden if kwargs["relation"] == LESS_THAN else required).append(kwargs["keyword"])
        elif instruction == NTH_PARAGRAPH:
            required.append(kwargs["first_word"])
            parts = max(parts, kwargs["num_paragraphs"])
        elif instruction == LETTER and kwargs["let_relation"] == LESS_THAN:
            rare_letters.append((kwargs["letter"], kwargs["let_frequency"]))
        elif instruction == SENTENCES and kwargs["relation"] == LESS_THAN:
            sentences = kwargs["num_sentences"]
        elif instruction == CAPITAL_WORDS and kwargs["capital_relation"] == LESS_THAN:
            capitals = kwargs["capital_frequency"]
        elif instruction in _PARTS:
            if instruction == SECTIONS and kwargs["section_spliter"].isupper():
                headings = kwargs["num_sections"]
            parts = max(parts, kwargs[_PARTS[instruction]])
    named = [*required, *forbidden]
    if len(set(named)) < len(named) or any(word in request.lower() for word in named):
        return True
    if sentences is not None and sentences <= parts + 1:
        return True
    if capitals is not None and capitals <= headings:
        return True
    text = " ".join(required)
    return any(word in text for word in forbidden) or any(
        text.count(letter) >= n for letter, n in rare_letters
    )
