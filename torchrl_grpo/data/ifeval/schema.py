"""The 25 instruction types of IFEval, their arguments, and the validation of a row's truth.

A truth is ``{"instruction_id_list": [...], "kwargs": [...]}`` with one kwargs mapping per instruction. The
benchmark's own file lists only the arguments that apply. The hub's copy lists the arguments of all types, and
gives ``None`` for those that do not apply. :func:`clean_truth` accepts both.
:mod:`torchrl_grpo.rewards.ifeval.checks` defines the meaning of each instruction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchrl_grpo.errors import DataError

AT_LEAST, LESS_THAN = "at least", "less than"
RELATIONS = (AT_LEAST, LESS_THAN)
CONSTRAINED_RESPONSES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
RESPONSE_DIVIDER = "******"


def _count(value: Any) -> int | None:
    # Data frames may have turned whole numbers into floats.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value.strip() else None


def _letter(value: Any) -> str | None:
    return value.strip() if isinstance(value, str) and len(value.strip()) == 1 else None


def _relation(value: Any) -> str | None:
    return value if isinstance(value, str) and value in RELATIONS else None


def _texts(value: Any) -> list[str] | None:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        return None
    return list(value) if all(_text(item) is not None for item in value) else None


# A function that reads an argument and returns None for an invalid value, and a description for messages.
_Reader = tuple[Callable[[Any], Any], str]
_COUNT: _Reader = (_count, "a whole number")
_TEXT: _Reader = (_text, "a text")
_LETTER: _Reader = (_letter, "a single character")
_RELATION: _Reader = (_relation, '"at least" or "less than"')
_TEXTS: _Reader = (_texts, "a list of texts")

ARGUMENTS: dict[str, dict[str, _Reader]] = {
    "change_case:capital_word_frequency": {"capital_frequency": _COUNT, "capital_relation": _RELATION},
    "change_case:english_capital": {},
    "change_case:english_lowercase": {},
    "combination:repeat_prompt": {"prompt_to_repeat": _TEXT},
    "combination:two_responses": {},
    "detectable_content:number_placeholders": {"num_placeholders": _COUNT},
    "detectable_content:postscript": {"postscript_marker": _TEXT},
    "detectable_format:constrained_response": {},
    "detectable_format:json_format": {},
    "detectable_format:multiple_sections": {"section_spliter": _TEXT, "num_sections": _COUNT},
    "detectable_format:number_bullet_lists": {"num_bullets": _COUNT},
    "detectable_format:number_highlighted_sections": {"num_highlights": _COUNT},
    "detectable_format:title": {},
    "keywords:existence": {"keywords": _TEXTS},
    "keywords:forbidden_words": {"forbidden_words": _TEXTS},
    "keywords:frequency": {"keyword": _TEXT, "frequency": _COUNT, "relation": _RELATION},
    "keywords:letter_frequency": {"letter": _LETTER, "let_frequency": _COUNT, "let_relation": _RELATION},
    "language:response_language": {"language": _TEXT},
    "length_constraints:nth_paragraph_first_word": {
        "num_paragraphs": _COUNT,
        "nth_paragraph": _COUNT,
        "first_word": _TEXT,
    },
    "length_constraints:number_paragraphs": {"num_paragraphs": _COUNT},
    "length_constraints:number_sentences": {"num_sentences": _COUNT, "relation": _RELATION},
    "length_constraints:number_words": {"num_words": _COUNT, "relation": _RELATION},
    "punctuation:no_comma": {},
    "startend:end_checker": {"end_phrase": _TEXT},
    "startend:quotation": {},
}


def clean_truth(ids: Any, kwargs: Any, where: str) -> dict[str, Any]:
    """Validate the truth of one row.

    Args:
        ids: the row's ``instruction_id_list``.
        kwargs: the row's ``kwargs``, one mapping per instruction. ``None`` values and arguments that
            the instruction does not take are dropped.
        where: name of the row in error messages, e.g. ``"row 17 of ifeval.jsonl"``.

    Returns:
        ``{"instruction_id_list": [...], "kwargs": [...]}``, where each mapping has exactly the arguments of
        its instruction.

    Raises:
        DataError: there are no instructions, an instruction is unknown, or an argument is missing or invalid.
    """
    if isinstance(ids, str) or not isinstance(ids, Sequence) or not ids:
        raise DataError(
            f"ifeval: {where} has instruction_id_list {ids!r}; write a list of at least one instruction id"
        )
    if isinstance(kwargs, str) or not isinstance(kwargs, Sequence) or len(kwargs) != len(ids):
        raise DataError(
            f"ifeval: {where} has {len(ids)} instructions, but its kwargs is {kwargs!r}; "
            "write a list with one mapping per instruction"
        )
    return {
        "instruction_id_list": list(ids),
        "kwargs": [
            _clean_kwargs(instruction, arguments, where)
            for instruction, arguments in zip(ids, kwargs, strict=True)
        ],
    }


def _clean_kwargs(instruction: Any, arguments: Any, where: str) -> dict[str, Any]:
    if not isinstance(instruction, str) or instruction not in ARGUMENTS:
        raise DataError(
            f"ifeval: {where} has the unknown instruction {instruction!r}; known are: {', '.join(ARGUMENTS)}"
        )
    if arguments is None:  # some readers turn a column of empty mappings into nulls
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise DataError(
            f"ifeval: {where} has kwargs {arguments!r} for {instruction!r}; write a mapping of its arguments"
        )
    cleaned: dict[str, Any] = {}
    for name, (read, description) in ARGUMENTS[instruction].items():
        if arguments.get(name) is None:
            raise DataError(
                f"ifeval: {where} lacks the argument {name!r} of {instruction!r}; "
                f"its kwargs are {dict(arguments)!r}; add {name!r}: {description}"
            )
        value = read(arguments[name])
        if value is None:
            raise DataError(
                f"ifeval: {where} has {name}={arguments[name]!r} for {instruction!r}; write {description}"
            )
        cleaned[name] = value
    return cleaned
