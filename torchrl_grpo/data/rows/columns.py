"""Read text and answers from the columns of a row, with a helpful error when a column is missing."""

from __future__ import annotations

import math

from torchrl_grpo.data.rows.sources import Row
from torchrl_grpo.errors import DataError


def is_missing(value: object) -> bool:
    """Whether a value stands for none: null, or the NaN with which a table of numbers writes null."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def text(row: Row, column: str, dataset: str) -> str:
    """Return the non-empty string in a column.

    Args:
        row: the row.
        column: the column's name.
        dataset: the data set's name, for messages.

    Returns:
        The string, unchanged.

    Raises:
        DataError: the column is missing, is null, is not a string, or holds only spaces.
    """
    if column not in row.values:
        present = ", ".join(map(repr, row.values)) or "none"
        own = "" if dataset == "jsonl" else "env.dataset=jsonl and "
        raise DataError(
            f"{dataset}: {row.where} has no column {column!r}, and its columns are {present}; rename one, or "
            f"name yours with {own}env.fields={{question:COLUMN}} (for python -m torchrl_grpo.rewards: "
            "--dataset jsonl --field question=COLUMN)"
        )
    value = row.values[column]
    if is_missing(value):
        raise DataError(
            f"{dataset}: {row.where}: column {column!r} is null, not a string; fill it or remove the row"
        )
    if not isinstance(value, str):
        raise DataError(
            f"{dataset}: {row.where}: column {column!r} is {repr(value)[:80]}, of type "
            f"{type(value).__name__}, not a string; write it in quotes"
        )
    if not value.strip():
        raise DataError(f"{dataset}: {row.where}: column {column!r} is empty; fill it or remove the row")
    return value


def is_answer(value: object) -> bool:
    """Whether :func:`answer` takes a value: text that is not blank, or a finite number."""
    if isinstance(value, str):
        return bool(value.strip())
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def answer(row: Row, column: str, dataset: str) -> str:
    """Return the answer in a column as text. The column may hold text or numbers.

    Args:
        row: the row.
        column: the column's name.
        dataset: the data set's name, for messages.

    Returns:
        The text without outer spaces. A whole number has no decimal point even if it is stored as a float,
        because a table stores an integer column with missing values as floats.

    Raises:
        DataError: the column is missing, or holds neither text nor a finite number.
    """
    value = row.values.get(column)
    if isinstance(value, float) and math.isfinite(value):
        return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return text(row, column, dataset).strip()
