"""Data sets that are passed to a trainer: lists of rows, Hugging Face data sets, and the like.

A row is a mapping of columns, or an object with them as attributes. A data set or its rows may compute their
own reward: ``dataset.get_reward(index, completion)`` or ``row.get_reward(completion)``.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from torchrl_grpo.data.example import Example
from torchrl_grpo.errors import ConfigError, DataError

# Columns that say which row of which data set a problem is.
SPLIT, INDEX = "_split", "_index"
# Name of the reward of a data set, as a method and in the configuration.
REWARD = "get_reward"
# Attributes of an object that are columns even if they are properties.
_READ = ("question", "messages", "prompt", "answer", "solution")
# What a column of an object must be to be a column of the data set. The object keeps everything else.
_PLAIN = (str, int, float, list, tuple, dict, type(None))
_ARGUMENTS = {"train": "train_dataset", "test": "eval_dataset"}


class _RowsByNumber(Protocol):
    """Rows by their number, mappings or objects."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any:
        """Return a row."""


# A stream is an iterable that begins anew each time.
Rows = _RowsByNumber | Iterable[Any]


class PassedDataset:
    """What ``env.dataset`` refers to for rows that were passed to ``GRPOTrainer``.

    Like a function of a user, it takes a split and returns rows.

    Args:
        train: rows to train on.
        held_out: rows for the evaluation; None takes some of ``train``.
    """

    def __init__(self, train: Rows, held_out: Rows | None) -> None:
        self.splits = {"train": train, "test": held_out}

    def __call__(self, split: str) -> list[dict[str, Any]] | RowStream | None:
        """Return the rows of a split. Those of a stream are read when they are asked for.

        Raises:
            DataError: a row has no columns, or no reward where others have one.
        """
        rows: Any = self.splits[split]
        if rows is None:
            return None
        if not hasattr(rows, "__len__"):
            return RowStream(rows, split)
        rewarded = not hasattr(rows, REWARD) and rewards_itself(rows)
        return [_row(rows[index], index, split, rewarded) for index in range(len(rows))]


class RowStream:
    """The rows of a data set that streams.

    Args:
        rows: iterable that begins anew each time.
        split: the split.
    """

    def __init__(self, rows: Iterable[Any], split: str) -> None:
        self._rows, self._split = rows, split

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index, row in enumerate(self._rows):
            yield _row(row, index, self._split, rewarded=False)


class PassedReward:
    """The reward that a data set, or each of its rows, computes itself.

    Args:
        dataset: the data set.
    """

    __name__ = REWARD

    def __init__(self, dataset: PassedDataset) -> None:
        self._dataset = dataset

    def __call__(self, completion: str, example: Example) -> Any:
        """Return the reward of a completion: a number, or what else a reward may return."""
        rows: Any = self._dataset.splits[example.columns[SPLIT]]
        index = example.columns[INDEX]
        if hasattr(rows, REWARD):
            return _plain(rows.get_reward(index, completion))
        own = _reward_of(rows[index])
        if own is None:
            # Rows to train on without it are refused when they are read.
            raise DataError(f"{_ARGUMENTS[example.columns[SPLIT]]}[{index}] has no {REWARD}")
        return _plain(own(completion))


def rewards_itself(rows: Any) -> bool:
    """Whether a data set or its first row computes the reward. Rows of a stream are not asked."""
    return hasattr(rows, REWARD) or (hasattr(rows, "__len__") and _reward_of(rows[0]) is not None)


def check_rows(rows: Any, name: str) -> None:
    """Check that ``rows`` has rows by number or is a stream, and that the first row has columns.

    Args:
        rows: what was passed.
        name: name of the argument.

    Raises:
        ConfigError: it is something else; the message says what to pass.
        DataError: the first row has no columns.
    """
    kind = type(rows).__name__
    if isinstance(rows, str | Path):
        keys = '"env": "jsonl", "env.data_path"' if name == "train_dataset" else '"env.eval_data_path"'
        raise ConfigError(f'{name}={str(rows)!r} is no data set; write config={{{keys}: "{rows}"}} instead')
    if isinstance(rows, Mapping):
        parts = ", ".join(map(repr, rows)) or "none"
        raise ConfigError(f"{name} is {kind} with the parts {parts}; give one of them, e.g. data['train']")
    if hasattr(rows, "iloc"):
        raise ConfigError(f'{name} is {kind}, which is no list of rows; write {name}=data.to_dict("records")')
    has_length = hasattr(rows, "__len__")
    streams = hasattr(rows, "__iter__") and not has_length
    if hasattr(rows, "__next__") or not (streams or (has_length and hasattr(rows, "__getitem__"))):
        raise ConfigError(
            f"{name} is {kind}, which has no length or rows by number, and is read only once; write "
            f"{name}=list(itertools.islice(data, 10_000)), or as many as you need, or pass an object whose "
            "__iter__ begins anew"
        )
    if not streams and len(rows) == 0:
        raise ConfigError(f"{name} has no rows; give at least two")
    first = next(iter(rows), None) if streams else rows[0]
    _row(first, 0, "train" if name == "train_dataset" else "test", rewarded=False)


def columns(row: object) -> dict[str, Any] | None:
    """Return the columns of a row; None if it is neither a mapping nor an object with columns."""
    if isinstance(row, Mapping):
        return {name: value for name, value in row.items() if name != REWARD or not callable(value)}
    if dataclasses.is_dataclass(row) and not isinstance(row, type):
        names = [field.name for field in dataclasses.fields(row)]
    elif hasattr(row, "_fields"):  # a named tuple
        names = list(row._fields)
    elif _reward_of(row) is not None:
        names = [name for name in getattr(row, "__dict__", {}) if not name.startswith("_")]
    else:
        return None
    names += [name for name in _READ if name not in names and hasattr(row, name)]
    attributes = {name: getattr(row, name) for name in names}
    return {name: value for name, value in attributes.items() if isinstance(value, _PLAIN)}


def _plain(result: Any) -> Any:
    """Return a reward as a float; a mapping or an awaitable as it is."""
    return result if isinstance(result, Mapping) or inspect.isawaitable(result) else float(result)


def _reward_of(row: Any) -> Callable[[str], Any] | None:
    own = row.get(REWARD) if isinstance(row, Mapping) else None
    reward = own if callable(own) else getattr(row, REWARD, None)
    return reward if callable(reward) else None


def _row(row: object, index: int, split: str, rewarded: bool) -> dict[str, Any]:
    row_columns = columns(row)
    if row_columns is None:
        raise DataError(
            f"{_ARGUMENTS[split]}[{index}] is {type(row).__name__} {row!r:.60}, not a mapping of columns; "
            'give rows such as {"question": ..., "answer": ...}'
        )
    if rewarded and _reward_of(row) is None:
        raise DataError(
            f"{_ARGUMENTS[split]}[{index}] has no {REWARD}, and the first row has one; give it to every row, "
            "or to none"
        )
    return {**row_columns, SPLIT: split, INDEX: index}
