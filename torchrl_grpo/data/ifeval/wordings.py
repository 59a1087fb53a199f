"""The arguments of each instruction type, and several wordings of the instruction.

Numbers are small enough for a response of one or two hundred words. Every wording states all arguments, so
that the writer knows everything that the checks look at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from torchrl_grpo.data.ifeval import topics
from torchrl_grpo.data.ifeval.schema import AT_LEAST, CONSTRAINED_RESPONSES, LESS_THAN, RESPONSE_DIVIDER

Kwargs = dict[str, Any]

_COMMON_LETTERS = "aeioutnsrlcdmpgh"
_RARE_LETTERS = "jqxzkvb"  # none is in "My answer is yes." or "no.", so a bound on them forbids neither
_SECTION_WORDS = ("SECTION", "Section", "PART", "Part", "CHAPTER")
_OPTIONS = " ".join(f'"{option}"' for option in CONSTRAINED_RESPONSES)


@dataclass(frozen=True)
class Wording:
    """One instruction type.

    Attributes:
        draw: function that draws the arguments, given a random generator and the request.
        phrases: format strings over the arguments. Lists are quoted and joined.
        relation: argument that selects ``phrases`` or ``less_phrases``, or None.
        less_phrases: format strings for ``"less than"``.
    """

    draw: Callable[[Random, str], Kwargs]
    phrases: tuple[str, ...]
    relation: str | None = None
    less_phrases: tuple[str, ...] = ()

    def format(self, rng: Random, kwargs: Kwargs) -> str:
        """Return the text of the instruction, with a random wording."""
        fewer = self.relation is not None and kwargs[self.relation] == LESS_THAN
        phrase = rng.choice(self.less_phrases if fewer else self.phrases)
        return phrase.format(**{name: _format_value(name, value) for name, value in kwargs.items()})


def _format_value(name: str, value: Any) -> str:
    if name == "language":
        return topics.LANGUAGES[value]
    if isinstance(value, list):
        quoted = [f'"{item}"' for item in value]
        return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"
    return str(value)


def _nothing(rng: Random, request: str) -> Kwargs:
    return {}


def _one(name: str, low: int, high: int) -> Callable[[Random, str], Kwargs]:
    return lambda rng, request: {name: rng.randint(low, high)}


def _either(name: str, relation: str, at_least: range, less_than: range) -> Callable[[Random, str], Kwargs]:
    def draw(rng: Random, request: str) -> Kwargs:
        kind = rng.choice((AT_LEAST, LESS_THAN))
        return {name: rng.choice(at_least if kind == AT_LEAST else less_than), relation: kind}

    return draw


def _letter(rng: Random, request: str) -> Kwargs:
    kind = rng.choice((AT_LEAST, LESS_THAN))
    letter = rng.choice(_COMMON_LETTERS if kind == AT_LEAST else _RARE_LETTERS)
    number = rng.randint(3, 15) if kind == AT_LEAST else rng.randint(2, 6)
    return {"letter": letter, "let_relation": kind, "let_frequency": number}


def _keyword(rng: Random, request: str) -> Kwargs:
    kind = rng.choice((AT_LEAST, AT_LEAST, LESS_THAN))
    return {"keyword": rng.choice(topics.WORDS), "relation": kind, "frequency": rng.randint(2, 4)}


def _words(name: str) -> Callable[[Random, str], Kwargs]:
    return lambda rng, request: {name: rng.sample(topics.WORDS, rng.randint(1, 3))}


def _nth_paragraph(rng: Random, request: str) -> Kwargs:
    paragraphs = rng.randint(2, 4)
    return {
        "num_paragraphs": paragraphs,
        "nth_paragraph": rng.randint(1, paragraphs),
        "first_word": rng.choice(topics.OPENERS),
    }


def _sections(rng: Random, request: str) -> Kwargs:
    return {"section_spliter": rng.choice(_SECTION_WORDS), "num_sections": rng.randint(2, 4)}


WORDINGS: dict[str, Wording] = {
    "change_case:capital_word_frequency": Wording(
        _either("capital_frequency", "capital_relation", range(2, 9), range(3, 9)),
        (
            "Write at least {capital_frequency} words in all capital letters.",
            "Put {capital_frequency} or more words in FULL CAPITALS.",
            "Stress no fewer than {capital_frequency} words by writing them entirely in capital letters.",
        ),
        "capital_relation",
        (
            "Use fewer than {capital_frequency} words written in all capital letters.",
            "Words in full capitals must appear less than {capital_frequency} times.",
            "Keep the count of fully capitalised words below {capital_frequency}.",
        ),
    ),
    "change_case:english_capital": Wording(
        _nothing,
        (
            "Write everything in English and in capital letters only.",
            "Your whole answer must be in English with every letter capitalised.",
            "Use nothing but capital letters, and answer in English.",
            "No lowercase letters are allowed: answer in English, in all capitals.",
        ),
    ),
    "change_case:english_lowercase": Wording(
        _nothing,
        (
            "Write everything in English and in lowercase letters only.",
            "Your whole answer must be in English, without a single capital letter.",
            "Answer in English and leave out every capital letter, at the start of sentences too.",
            "Only lowercase English text is allowed.",
        ),
    ),
    "combination:repeat_prompt": Wording(
        lambda rng, request: {"prompt_to_repeat": request},
        (
            'Begin by copying "{prompt_to_repeat}" word for word, without the quotation marks and with '
            "nothing before it. Then answer it.",
            'First write "{prompt_to_repeat}" exactly as it stands here, but leave out the quotation marks. '
            "Your answer follows after that.",
            'Before answering, repeat this sentence unchanged: "{prompt_to_repeat}" Do not write anything '
            "ahead of it, not even a quotation mark.",
        ),
    ),
    "combination:two_responses": Wording(
        _nothing,
        (
            f"Give two different responses, and separate them with six asterisks: {RESPONSE_DIVIDER}",
            f"Answer twice, in two different ways, with only {RESPONSE_DIVIDER} between the two answers.",
            f"I want exactly 2 distinct answers, divided by one line of 6 asterisks ({RESPONSE_DIVIDER}).",
        ),
    ),
    "detectable_content:number_placeholders": Wording(
        _one("num_placeholders", 2, 6),
        (
            "Leave at least {num_placeholders} placeholders in square brackets, such as [name] or [date].",
            "Include {num_placeholders} or more blanks to fill in later, in square brackets like [place].",
            "There must be no fewer than {num_placeholders} bracketed placeholders, for example [price].",
        ),
    ),
    "detectable_content:postscript": Wording(
        lambda rng, request: {"postscript_marker": rng.choice(("P.S.", "P.P.S"))},
        (
            'Close with a postscript that starts with "{postscript_marker}".',
            'After the main text, add a postscript beginning with "{postscript_marker}".',
            'Finish by adding a note introduced by "{postscript_marker}".',
        ),
    ),
    "detectable_format:constrained_response": Wording(
        _nothing,
        (
            f"Your answer must contain one of these sentences exactly as written: {_OPTIONS}",
            f"Choose one of the following and include it word for word: {_OPTIONS}",
            f"Settle the question with one of these exact sentences: {_OPTIONS}",
        ),
    ),
    "detectable_format:json_format": Wording(
        _nothing,
        (
            "Give the whole answer as valid JSON only. A Markdown code block (```) around it is fine.",
            "Your entire output must be one JSON object.",
            "Reply in JSON format only, without any text around it.",
        ),
    ),
    "detectable_format:multiple_sections": Wording(
        _sections,
        (
            "Divide your answer into {num_sections} sections, headed {section_spliter} 1, "
            "{section_spliter} 2 and so on.",
            "Structure the text in {num_sections} parts. Mark the beginning of each with "
            "{section_spliter} X, where X is its number.",
            "There must be {num_sections} sections; write {section_spliter} and its number before each.",
        ),
    ),
    "detectable_format:number_bullet_lists": Wording(
        _one("num_bullets", 2, 6),
        (
            "Include exactly {num_bullets} bullet points in Markdown, each on a line that begins with an "
            "asterisk and a space:\n* like this one",
            "Your answer must have exactly {num_bullets} Markdown bullets, no more and no fewer. Begin each "
            'one with "* ".',
            "List your points as exactly {num_bullets} bullets of the form:\n* A point.",
        ),
    ),
    "detectable_format:number_highlighted_sections": Wording(
        _one("num_highlights", 2, 5),
        (
            "Highlight at least {num_highlights} phrases with asterisks in Markdown, like *this phrase*.",
            "Set {num_highlights} or more parts of the text in Markdown emphasis, i.e. *emphasised part*.",
            "At least {num_highlights} passages must stand between single asterisks, e.g. *a passage*.",
        ),
    ),
    "detectable_format:title": Wording(
        _nothing,
        (
            "Give it a title in double angular brackets, such as <<A Fitting Title>>.",
            "Your answer must carry a title written as <<title>>.",
            "Add a heading enclosed in << and >>, for example <<My Heading>>.",
        ),
    ),
    "keywords:existence": Wording(
        _words("keywords"),
        (
            "Make use of the following in your answer: {keywords}.",
            "Your text has to contain {keywords}.",
            "Be sure to include {keywords} somewhere.",
            "Work in {keywords}.",
        ),
    ),
    "keywords:forbidden_words": Wording(
        _words("forbidden_words"),
        (
            "Do not use {forbidden_words} anywhere.",
            "Your answer must avoid {forbidden_words}.",
            "Leave out {forbidden_words} completely.",
        ),
    ),
    "keywords:frequency": Wording(
        _keyword,
        (
            'Use the word "{keyword}" at least {frequency} times.',
            'The word "{keyword}" should come up {frequency} or more times.',
            'Mention "{keyword}" no fewer than {frequency} times.',
        ),
        "relation",
        (
            'Use the word "{keyword}" less than {frequency} times.',
            'The word "{keyword}" may come up, but fewer than {frequency} times.',
            'Keep mentions of "{keyword}" below {frequency}.',
        ),
    ),
    "keywords:letter_frequency": Wording(
        _letter,
        (
            'The letter "{letter}" must appear at least {let_frequency} times.',
            'Use the letter "{letter}" {let_frequency} or more times.',
            'Write so that "{letter}" occurs as a letter no fewer than {let_frequency} times.',
        ),
        "let_relation",
        (
            'The letter "{letter}" must appear less than {let_frequency} times.',
            'Use the letter "{letter}" fewer than {let_frequency} times.',
            'Keep the number of times the letter "{letter}" occurs below {let_frequency}.',
        ),
    ),
    "language:response_language": Wording(
        lambda rng, request: {"language": rng.choice(tuple(topics.LANGUAGES))},
        (
            "Answer in {language} only; no other language is allowed.",
            "Your entire response must be in {language}.",
            "Write the answer completely in the {language} language.",
        ),
    ),
    "length_constraints:nth_paragraph_first_word": Wording(
        _nth_paragraph,
        (
            "Write exactly {num_paragraphs} paragraphs with one blank line between each two. Paragraph "
            '{nth_paragraph} must begin with the word "{first_word}".',
            "There should be {num_paragraphs} paragraphs, separated by two line breaks and by nothing else; "
            'the first word of paragraph number {nth_paragraph} has to be "{first_word}".',
            'Start paragraph {nth_paragraph} of exactly {num_paragraphs} with "{first_word}". Paragraphs are '
            "divided by an empty line.",
        ),
    ),
    "length_constraints:number_paragraphs": Wording(
        _one("num_paragraphs", 2, 5),
        (
            "Write exactly {num_paragraphs} paragraphs and put the Markdown divider *** between them.",
            "Your answer must consist of {num_paragraphs} paragraphs, separated from each other by ***",
            "Separate the paragraphs with three asterisks (***); write exactly {num_paragraphs} paragraphs.",
        ),
    ),
    "length_constraints:number_sentences": Wording(
        _either("num_sentences", "relation", range(3, 11), range(3, 11)),
        (
            "Write at least {num_sentences} sentences.",
            "Your answer needs {num_sentences} or more sentences.",
            "Do not stop before you have written {num_sentences} sentences.",
        ),
        "relation",
        (
            "Write less than {num_sentences} sentences.",
            "Use fewer than {num_sentences} sentences.",
            "Keep the number of sentences under {num_sentences}.",
        ),
    ),
    "length_constraints:number_words": Wording(
        _either("num_words", "relation", range(30, 151, 10), range(60, 151, 10)),
        (
            "Write at least {num_words} words.",
            "Your answer should be {num_words} words long or longer.",
            "Use no fewer than {num_words} words.",
        ),
        "relation",
        (
            "Write less than {num_words} words.",
            "Your answer should stay under {num_words} words.",
            "Use fewer than {num_words} words.",
        ),
    ),
    "punctuation:no_comma": Wording(
        _nothing,
        (
            "Do not use any commas.",
            "Your answer must not contain a comma.",
            "Write without commas.",
            "Commas are forbidden in your reply.",
        ),
    ),
    "startend:end_checker": Wording(
        lambda rng, request: {"end_phrase": rng.choice(topics.END_PHRASES)},
        (
            'End your answer with this exact sentence and nothing after it: "{end_phrase}"',
            'The very last words must be "{end_phrase}" (without the quotation marks).',
            'Finish with "{end_phrase}", word for word, and stop there.',
        ),
    ),
    "startend:quotation": Wording(
        _nothing,
        (
            "Put your whole answer between double quotation marks.",
            'The answer must start and end with a double quotation mark (").',
            'Enclose the entire response in double quotes, like "this".',
        ),
    ),
}
