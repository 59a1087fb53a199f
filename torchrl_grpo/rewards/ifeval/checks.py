"""Boolean checks of IFEval's 25 instruction types.

They have the benchmark's meaning (arXiv 2311.07911), including oddities that affect a verdict. Every check
takes time linear in the response, and none raises. :mod:`~torchrl_grpo.rewards.ifeval.scoring` has strict and
loose scoring, and :mod:`~torchrl_grpo.data.ifeval.schema` validates the arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from torchrl_grpo.data.ifeval.schema import AT_LEAST, CONSTRAINED_RESPONSES, RESPONSE_DIVIDER
from torchrl_grpo.rewards.ifeval import text

Kwargs = dict[str, Any]
Check = Callable[[str, Kwargs], bool]


_PARAGRAPH_DIVIDER = re.compile(r"\s?\*\*\*\s?")
# Before the bullet only blanks are skipped, not line ends. The count is the same, without quadratic rescans.
# After a star, any character except another star belongs to the bullet, including the line end.
_STAR_BULLET = re.compile(r"^[^\S\n]*\*[^*].*$", re.MULTILINE)
_DASH_BULLET = re.compile(r"^[^\S\n]*-.*$", re.MULTILINE)
_HIGHLIGHT = re.compile(r"\*([^\n*]*)\*")
_DOUBLE_HIGHLIGHT = re.compile(r"\*\*([^\n*]*)\*\*")
_POSTSCRIPTS = {"P.S.": re.compile(r"p\.\s?s\."), "P.P.S": re.compile(r"p\.\s?p\.\s?s")}
_WORD_END = re.compile(r"[.,?!'\"]")
_FENCE_OPENINGS = ("```json", "```Json", "```JSON", "```")


def _holds(count: int, relation: str, bound: int) -> bool:
    return count >= bound if relation == AT_LEAST else count < bound


# --- keywords ---------------------------------------------------------------------------------------


def _occurrences(response: str, keyword: str) -> int:
    """Count occurrences, including those inside other words. Case is ignored."""
    return sum(1 for _ in re.finditer(re.escape(keyword), response, re.IGNORECASE))


def _keywords_exist(response: str, kwargs: Kwargs) -> bool:
    return all(re.search(re.escape(word), response, re.IGNORECASE) for word in kwargs["keywords"])


def _keyword_frequency(response: str, kwargs: Kwargs) -> bool:
    return _holds(_occurrences(response, kwargs["keyword"].strip()), kwargs["relation"], kwargs["frequency"])


def _no_forbidden_words(response: str, kwargs: Kwargs) -> bool:
    """Whole words are forbidden: ``cat`` does not forbid ``category``."""
    return not any(
        re.search(rf"\b{re.escape(word)}\b", response, re.IGNORECASE) for word in kwargs["forbidden_words"]
    )


def _letter_frequency(response: str, kwargs: Kwargs) -> bool:
    count = response.lower().count(kwargs["letter"].strip().lower())
    return _holds(count, kwargs["let_relation"], kwargs["let_frequency"])


# --- language and case ------------------------------------------------------------------------------


def _in_language(response: str, language: str) -> bool:
    # Text without letters has no language, and the benchmark accepts it.
    return text.detect_language(response) in (language, None)


def _response_language(response: str, kwargs: Kwargs) -> bool:
    return _in_language(response, kwargs["language"])


def _english_capital(response: str, kwargs: Kwargs) -> bool:
    return response.isupper() and _in_language(response, "en")


def _english_lowercase(response: str, kwargs: Kwargs) -> bool:
    return response.islower() and _in_language(response, "en")


def _capital_word_frequency(response: str, kwargs: Kwargs) -> bool:
    bound = kwargs["capital_frequency"]
    return _holds(text.count_capital_words(response, stop_at=bound), kwargs["capital_relation"], bound)


# --- length -----------------------------------------------------------------------------------------


def _number_words(response: str, kwargs: Kwargs) -> bool:
    return _holds(text.count_words(response), kwargs["relation"], kwargs["num_words"])


def _number_sentences(response: str, kwargs: Kwargs) -> bool:
    bound = kwargs["num_sentences"]
    return _holds(text.count_sentences(response, stop_at=bound), kwargs["relation"], bound)


def _parts_between(parts: list[str]) -> list[str] | None:
    """Return ``parts`` without an empty first or last part, or None if a part between them is empty."""
    kept = [part for part in parts if part.strip()]
    empty_inside = any(not part.strip() for part in parts[1:-1])
    return None if empty_inside else kept


def _number_paragraphs(response: str, kwargs: Kwargs) -> bool:
    """``***`` separates paragraphs in this check."""
    paragraphs = _parts_between(_PARAGRAPH_DIVIDER.split(response))
    return paragraphs is not None and len(paragraphs) == kwargs["num_paragraphs"]


def _nth_paragraph_first_word(response: str, kwargs: Kwargs) -> bool:
    """A blank line separates paragraphs in this check. Empty ones have a number but are not counted."""
    places = response.split("\n\n")
    count = sum(1 for place in places if place.strip())
    nth = kwargs["nth_paragraph"]
    if count != kwargs["num_paragraphs"] or not 1 <= nth <= count or not places[nth - 1].strip():
        return False
    word = places[nth - 1].split(maxsplit=1)[0].lstrip("'").lstrip('"')
    return bool(_WORD_END.split(word, maxsplit=1)[0].lower() == kwargs["first_word"].lower())


# --- format -----------------------------------------------------------------------------------------


def _number_bullets(response: str, kwargs: Kwargs) -> bool:
    bullets = len(_STAR_BULLET.findall(response)) + len(_DASH_BULLET.findall(response))
    return bool(bullets == kwargs["num_bullets"])


def _constrained_response(response: str, kwargs: Kwargs) -> bool:
    return any(option in response for option in CONSTRAINED_RESPONSES)


def _number_highlights(response: str, kwargs: Kwargs) -> bool:
    highlights = [*_HIGHLIGHT.findall(response), *_DOUBLE_HIGHLIGHT.findall(response)]
    return bool(sum(1 for content in highlights if content.strip()) >= kwargs["num_highlights"])


def _multiple_sections(response: str, kwargs: Kwargs) -> bool:
    heading = re.compile(rf"{re.escape(kwargs['section_spliter'].strip())}\s?\d+")
    return bool(sum(1 for _ in heading.finditer(response)) >= kwargs["num_sections"])


def _titles(response: str) -> Iterator[str]:
    """Yield the text between the first ``<<`` and the last ``>>`` of each line."""
    for line in response.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if start >= 0 and end > start + 2:
            yield line[start : end + 2].lstrip("<").rstrip(">")


def _title(response: str, kwargs: Kwargs) -> bool:
    return any(title.strip() for title in _titles(response))


def _json_format(response: str, kwargs: Kwargs) -> bool:
    """The whole response is JSON, in a code fence or bare."""
    body = response.strip()
    for opening in _FENCE_OPENINGS:
        body = body.removeprefix(opening)
    try:
        json.loads(body.removesuffix("```").strip())
    except (ValueError, RecursionError):  # RecursionError: the nesting is too deep for the parser
        return False
    return True


# --- content ----------------------------------------------------------------------------------------


def _number_placeholders(response: str, kwargs: Kwargs) -> bool:
    """A placeholder runs from ``[`` to the next ``]`` on the same line."""
    count = 0
    for line in response.split("\n"):
        start = line.find("[")
        while start >= 0:
            end = line.find("]", start + 1)
            if end < 0:
                break
            count += 1
            start = line.find("[", end + 1)
    return bool(count >= kwargs["num_placeholders"])


def _postscript(response: str, kwargs: Kwargs) -> bool:
    marker = kwargs["postscript_marker"].strip()
    pattern = _POSTSCRIPTS.get(marker)
    lowered = response.lower()
    return bool(pattern.search(lowered)) if pattern else marker.lower() in lowered


# --- start, end and combinations --------------------------------------------------------------------


def _repeat_prompt(response: str, kwargs: Kwargs) -> bool:
    return response.strip().lower().startswith(kwargs["prompt_to_repeat"].strip().lower())


def _two_responses(response: str, kwargs: Kwargs) -> bool:
    answers = _parts_between(response.split(RESPONSE_DIVIDER))
    return answers is not None and len(answers) == 2 and answers[0].strip() != answers[1].strip()


def _end_checker(response: str, kwargs: Kwargs) -> bool:
    return response.strip().strip('"').lower().endswith(kwargs["end_phrase"].strip().lower())


def _quotation(response: str, kwargs: Kwargs) -> bool:
    body = response.strip()
    return len(body) > 1 and body[0] == body[-1] == '"'


def _no_comma(response: str, kwargs: Kwargs) -> bool:
    return "," not in response


CHECKS: dict[str, Check] = {
    "change_case:capital_word_frequency": _capital_word_frequency,
    "change_case:english_capital": _english_capital,
    "change_case:english_lowercase": _english_lowercase,
    "combination:repeat_prompt": _repeat_prompt,
    "combination:two_responses": _two_responses,
    "detectable_content:number_placeholders": _number_placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:constrained_response": _constrained_response,
    "detectable_format:json_format": _json_format,
    "detectable_format:multiple_sections": _multiple_sections,
    "detectable_format:number_bullet_lists": _number_bullets,
    "detectable_format:number_highlighted_sections": _number_highlights,
    "detectable_format:title": _title,
    "keywords:existence": _keywords_exist,
    "keywords:forbidden_words": _no_forbidden_words,
    "keywords:frequency": _keyword_frequency,
    "keywords:letter_frequency": _letter_frequency,
    "language:response_language": _response_language,
    "length_constraints:nth_paragraph_first_word": _nth_paragraph_first_word,
    "length_constraints:number_paragraphs": _number_paragraphs,
    "length_constraints:number_sentences": _number_sentences,
    "length_constraints:number_words": _number_words,
    "punctuation:no_comma": _no_comma,
    "startend:end_checker": _end_checker,
    "startend:quotation": _quotation,
}
