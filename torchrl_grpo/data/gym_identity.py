"""What makes problems of ``reasoning_gym`` the same, by task.

The library words a problem in several ways, and writes what has no order in any order. So one problem has
many questions. Tasks that the table does not have give a problem one wording: the question says which it is.
In doubt the table says that two problems are the same, which costs a little variety and no more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torchrl_grpo.data.identity import arithmetic, number_puzzle

# What makes a question with its metadata the problem that it is.
_Rule = Callable[[str, Mapping[str, Any]], object]


def identity(task: str, entry: Mapping[str, Any]) -> str:
    """Return what makes problems of a task the same.

    Args:
        task: the task's name.
        entry: generated entry with ``question``, ``answer`` and ``metadata``. An entry of ``composite`` names
            its own task.

    Returns:
        A text that all wordings of a problem share; empty if the question itself says which problem it is.
    """
    metadata = {**entry["metadata"], "answer": entry["answer"]}
    task = metadata.get("source_dataset", task)
    rule = _RULES.get(task)
    if rule is None:
        return ""
    value = rule(entry["question"], metadata)
    # Tasks that share a kind of problem share a text.
    return value if isinstance(value, str) else f"{task}: {value}"


def _given(*names: str, any_order: str = "") -> _Rule:
    """The problem is the values of some fields; the order within those of ``any_order`` means nothing."""

    def rule(question: str, metadata: Mapping[str, Any]) -> object:
        loose = [_sorted(metadata[name]) for name in any_order.split()]
        return [repr(metadata.get(name)) for name in names] + loose

    return rule


def _sorted(values: Any) -> list[str]:
    return sorted(map(repr, values.items() if isinstance(values, Mapping) else values))


def _calculation(field: str) -> _Rule:
    """The problem is a calculation, whatever the order of its terms and factors."""
    return lambda question, metadata: arithmetic(metadata[field]) or [metadata[field]]


def _formula(field: str) -> _Rule:
    """The problem is a formula, whatever the name of its variable."""
    return lambda question, metadata: [re.sub(rf"\b{metadata['variable']}\b", "?", metadata[field])]


def _words(pattern: str, *names: str) -> _Rule:
    """The problem is some words of the question, in any order, and the values of some fields."""
    return lambda question, metadata: [
        *(repr(metadata[name]) for name in names),
        *sorted(re.findall(pattern, question)),
    ]


def _decimals(question: str, metadata: Mapping[str, Any]) -> object:
    expression = question.rpartition("\n")[2].removesuffix(" = ?")
    return arithmetic(expression) or [expression]


def _power(question: str, metadata: Mapping[str, Any]) -> object:
    return arithmetic(f"({metadata['base']}) ** ({metadata['exponent']})") or [question]


def _interval(question: str, metadata: Mapping[str, Any]) -> object:
    times = [metadata["start_time"], metadata["end_time"]]
    # A time of day has the date of today.
    return [time[11:] for time in times] if metadata["task_type"].startswith("time") else times


def _unnamed(question: str, metadata: Mapping[str, Any]) -> object:
    # Persons and places have other names in other words, and persons other pronouns.
    return [re.sub(r"\b(?:[A-Z]\w*|s?he|his|hers?|him|himself|herself)\b", "?", question)]


def _drawing(question: str, metadata: Mapping[str, Any]) -> object:
    return [question.split("\n\n")[1:-1]]


_RULES: dict[str, _Rule] = {
    # Calculations
    "basic_arithmetic": _calculation("expression"),
    "bitwise_arithmetic": _calculation("problem"),
    "chain_sum": _calculation("expression"),
    "complex_arithmetic": lambda question, metadata: [
        metadata["operation"],
        *sorted([metadata["num1"], metadata["num2"]]),
    ],
    "decimal_arithmetic": _decimals,
    "decimal_chain_sum": _calculation("expression"),
    "fraction_simplification": _given("numerator", "denominator"),
    "gcd": _given(any_order="numbers"),
    "lcm": _given(any_order="numbers"),
    "leg_counting": _given(any_order="animals"),
    "power_function": _power,
    "products": _calculation("expression"),
    "calendar_arithmetic": _given(
        *("task", "start_date", "end_date", "target_date", "offset_days", "year", "month", "ordinal"),
        *("weekday", "first_day"),
    ),
    "time_intervals": _interval,
    "dice": _words(r"\d+d\d+|\d+"),
    # Algebra and geometry
    "intermediate_integration": _formula("integrand"),
    "polynomial_equations": _formula("polynomial_expr"),
    "polynomial_multiplication": _given("polynomial_expr"),
    "simple_equations": _formula("equation"),
    "simple_integration": _formula("integrand"),
    "advanced_geometry": lambda question, metadata: [
        metadata["task_type"],
        *sorted(metadata[corner] for corner in "ABC"),
    ],
    "simple_geometry": _given("n_sides", any_order="known_angles"),
    # Numbers and words in any order
    "countdown": lambda question, metadata: number_puzzle(metadata["numbers"], metadata["target"]),
    "puzzle24": lambda question, metadata: number_puzzle(metadata["numbers"], 24),
    "number_filtering": _given("filter_value", any_order="original_numbers"),
    "number_format": _given("size", any_order="candidates"),
    "number_sorting": _given("direction", any_order="original_numbers"),
    "group_anagrams": _given(any_order="words"),
    "letter_jumble": _given(any_order="original_words"),
    "palindrome_generation": _given(any_order="letters"),
    "ransom_note": _given(any_order="ransom_note magazine"),
    "word_sorting": _given("direction", any_order="transformed_words"),
    "cryptarithm": _given("result_letters", any_order="words_letters"),
    # Texts that are hidden in several ways
    "caesar_cipher": _given("clear_text"),
    "emoji_mystery": _given("answer"),
    "figlet_font": _given("answer"),
    "sentence_reordering": _given("answer"),
    # Puzzles with several wordings, or with parts in any order
    "aiw": _words(r"\d+", "task_type"),
    "arc_agi": _given("task_id"),
    "bf": _given("bf_program"),
    "color_cube_rotation": _given("initial_state", "rotations", "target_side"),
    "course_schedule": _given(any_order="courses prerequisites"),
    "gsm_symbolic": _unnamed,
    "family_relationships": lambda question, metadata: [
        question.rpartition("\n\n")[0],
        metadata["person1"],
        metadata["person2"],
    ],
    "jugs": _words(r"\d+"),
    "kakurasu": _given("row_sums", "col_sums"),
    "knights_knaves": _given("statements"),
    "needle_haystack": _words(r"[^.]+"),
    "path_star": _words(r"[^|/]+"),
    "propositional_logic": _given(any_order="premises"),
    "quantum_lock": _given("initial_state", "initial_value", "target_value", any_order="buttons"),
    "rubiks_cube": _drawing,
    "survo": _given("puzzle", any_order="candidate_numbers"),
    "syllogism": lambda question, metadata: [
        metadata["conclusion"],
        *sorted([metadata["premise1"], metadata["premise2"]]),
    ],
    "tsumego": _given("board"),
    "word_ladder": lambda question, metadata: sorted([metadata["start_word"], metadata["end_word"]]),
}
