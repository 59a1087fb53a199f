"""Data sets that are passed to a trainer: lists of mappings, Hugging Face data sets, and the like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torchrl_grpo.data.example import Example
from torchrl_grpo.errors import DataError

# Columns that say which row of which data set a problem is.
SPLIT, INDEX = "_split", "_index"


class Rows(Protocol):
    """Rows by their number.

    It may also have ``get_reward(index, completion) -> float``, which then is the reward.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        """Return a row: its columns by name."""


class PassedDataset:
    """A data set as ``env.dataset`` names it.

    Args:
        train: rows to train on.
        held_out: rows for the evaluation; None takes some of ``train``.
    """

    def __init__(self, train: Rows, held_out: Rows | None) -> None:
        self.splits = {"train": train, "test": held_out}

    def __call__(self, split: str) -> list[dict[str, Any]] | None:
        """Return the rows of a split.

        Raises:
            DataError: a row is no mapping.
        """
        rows = self.splits[split]
        return None if rows is None else [_row(rows, index, split) for index in range(len(rows))]


class PassedReward:
    """The reward that a data set computes itself: ``get_reward(index, completion)``.

    Args:
        dataset: the data set.
    """

    __name__ = "get_reward"

    def __init__(self, dataset: PassedDataset) -> None:
        self._dataset = dataset

    def __call__(self, completion: str, example: Example) -> float:
        """Return the reward of a completion."""
        rows: Any = self._dataset.splits[example.columns[SPLIT]]
        return float(rows.get_reward(example.columns[INDEX], completion))


def _row(rows: Rows, index: int, split: str) -> dict[str, Any]:
    row: object = rows[index]
    if not isinstance(row, Mapping):
        name = "train_dataset" if split == "train" else "eval_dataset"
        raise DataError(
            f"{name}[{index}] is {type(row).__name__} {row!r:.60}, not a mapping of columns; give rows such "
            'as {"question": ..., "answer": ...}'
        )
    return {**row, SPLIT: split, INDEX: index}


def fields_of(row: Mapping[str, Any]) -> dict[str, str]:
    """Return ``env.fields`` for rows that have the prompt in a column of another name than ``question``."""
    if "question" in row:
        return {}
    for column in ("messages", "prompt"):
        if column in row:
            return {"messages" if isinstance(row[column], list) else "question": column}
    return {}
