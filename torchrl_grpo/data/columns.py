"""Taking text and answers out of a row, with a message that helps when they are not there."""

from __future__ import annotations

import math

from torchrl_grpo.data.sources import Row
from torchrl_grpo.errors import DataError


def text(row: Row, column: str, dataset: str) -> str:
    """The non-empty string in a column.

    Args:
        row: the row.
        column: the column's name.
        dataset: the data set, for messages.

    Returns:
        The string, unchanged.

    Raises:
        DataError: the column is missing, is not a string, or holds only spaces.
    """
    if column not in row.values:
        present = ", ".join(map(repr, row.values)) or "none"
        raise DataError(
            f"{dataset}: {row.where} has no column {column!r}; it has {present}. "
            "Rename the column, or name yours with env.dataset=jsonl and env.fields (for "
            "python -m torchrl_grpo.rewards: --dataset jsonl --field question=COLUMN)"
        )
    value = row.values[column]
    if not isinstance(value, str):
        raise DataError(
            f"{dataset}: {row.where}: column {column!r} is {type(value).__name__} {str(value)[:80]!r}, "
            "not a string; write it in quotes"
        )
    if not value.strip():
        raise DataError(f"{dataset}: {row.where}: column {column!r} is empty; fill it or remove the row")
    return value


def answer(row: Row, column: str, dataset: str) -> str:
    """The answer in a column: text, or a number as text.

    Args:
        row: the row.
        column: the column's name.
        dataset: the data set, for messages.

    Returns:
        The text without outer spaces; a whole number without a decimal point, whatever its type, because
        tables with a gap in such a column hold floats.

    Raises:
        DataError: the column is missing, or neither text nor a finite number.
    """
    value = row.values.get(column)
    if isinstance(value, float) and math.isfinite(value):
        return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return text(row, column, dataset).strip()
