"""Which instruction types never stand in one composed prompt, and when two sets of arguments clash.

A pair is here when no response can satisfy both, or when a reader could not tell what is asked (an
exact number of paragraphs across two separate responses, say). The benchmark draws its pairs more
freely; a training prompt that nobody can satisfy only adds noise.
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

# For the four types that leave little room, what they do go with.
_COMPATIBLE: dict[str, set[str]] = {
    # The repeated request is in mixed case, in English, and its length is not the writer's choice.
    REPEAT: {TITLE, BULLETS, HIGHLIGHTS, PLACEHOLDERS, POSTSCRIPT, ENDING, EXISTENCE},
    JSON: {CAPITAL, LOWERCASE, EXISTENCE, FORBIDDEN, FREQUENCY, LETTER, PLACEHOLDERS, NUM_WORDS},
    # Everything that counts English words, letters or sentences has no meaning in another language.
    LANGUAGE: {NO_COMMA, TITLE, BULLETS, HIGHLIGHTS, PARAGRAPHS, QUOTATION, TWO},
    CONSTRAINED: {TITLE, HIGHLIGHTS, EXISTENCE, FORBIDDEN, LETTER, NUM_WORDS, SENTENCES, NO_COMMA, QUOTATION},
}

# For the others, what they do not go with.
_INCOMPATIBLE: dict[str, set[str]] = {
    CAPITAL: {LOWERCASE, CAPITAL_WORDS, POSTSCRIPT, SECTIONS, ENDING},
    LOWERCASE: {CAPITAL_WORDS, POSTSCRIPT, SECTIONS, ENDING},
    TWO: {PARAGRAPHS, NTH_PARAGRAPH, SECTIONS, BULLETS, POSTSCRIPT, ENDING, QUOTATION},
    PARAGRAPHS: {NTH_PARAGRAPH, SECTIONS},
    NTH_PARAGRAPH: {SECTIONS, TITLE, POSTSCRIPT, BULLETS},
    ENDING: {POSTSCRIPT, QUOTATION, LETTER},
    NUM_WORDS: {SENTENCES},
}

# Types that ask for a number of parts, each of which wants a sentence, and the argument that says how many.
_PARTS = {PARAGRAPHS: "num_paragraphs", SECTIONS: "num_sections", BULLETS: "num_bullets"}


def _conflict(first: str, second: str) -> bool:
    for one, other in ((first, second), (second, first)):
        if one in _COMPATIBLE and other not in _COMPATIBLE[one]:
            return True
        if other in _INCOMPATIBLE.get(one, ()):
            return True
    return False


#: Every pair of instruction types that is never composed.
CONFLICTS: frozenset[frozenset[str]] = frozenset(
    frozenset(pair) for pair in combinations(ARGUMENTS, 2) if _conflict(*pair)
)


def clash(request: str, instructions: Sequence[tuple[str, dict[str, Any]]]) -> bool:
    """Whether the arguments of compatible instructions contradict each other or the request.

    Args:
        request: the writing task itself.
        instructions: pairs of instruction id and arguments.

    Returns:
        True where a text that must appear holds one that must not (or may only seldom), where a
        keyword is asked for twice or already stands in the request, or where the sentences or
        capitalised words allowed are too few for the parts asked for.
    """
    wanted: list[str] = []
    unwanted: list[str] = []
    rare_letters: list[tuple[str, int]] = []
    parts = 0
    sentences: int | None = None
    headings, capitals = 0, None
    for instruction, kwargs in instructions:
        if instruction == EXISTENCE:
            wanted += kwargs["keywords"]
        elif instruction == FORBIDDEN:
            unwanted += kwargs["forbidden_words"]
        elif instruction == FREQUENCY:
            (unwanted if kwargs["relation"] == LESS_THAN else wanted).append(kwargs["keyword"])
        elif instruction == NTH_PARAGRAPH:
            wanted.append(kwargs["first_word"])
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
    named = [*wanted, *unwanted]
    if len(set(named)) < len(named) or any(word in request.lower() for word in named):
        return True
    if sentences is not None and sentences <= parts + 1:
        return True
    if capitals is not None and capitals <= headings:
        return True
    text = " ".join(wanted)
    return any(word in text for word in unwanted) or any(
        text.count(letter) >= n for letter, n in rare_letters
    )
