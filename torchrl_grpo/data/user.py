"""Problems from a function of the user: ``env.dataset=FILE.py:FUNCTION``.

The function takes ``split``, which is ``"train"`` or ``"test"``, and ``env.task_args``. It returns a list of
rows, or an iterable. A row is a mapping of columns, which are read as those of a jsonl data set are. For
``"test"`` it may return None: then held-out problems are taken from the training rows. So are they if the
function takes no ``split``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from torchrl_grpo.config import Config
from torchrl_grpo.config.checks.data import check_fields
from torchrl_grpo.data import problems
from torchrl_grpo.data.jsonl import example
from torchrl_grpo.data.rows import sources, streams
from torchrl_grpo.errors import ConfigError, DataError, UserError
from torchrl_grpo.runtime import user_code

__all__ = ["example", "load"]

# An endless generator would fill the memory.
_MOST_ROWS = 10_000_000


def load(cfg: Config) -> problems.Problems:
    """Call the function and turn its rows into problems; see :func:`torchrl_grpo.data.load`.

    Raises:
        ConfigError: the function cannot be loaded or called, or it raises.
        DataError: it returns no rows, or a row is malformed.
    """
    check_fields(cfg.env)
    notes: list[str] = []
    train = _rows(cfg, "train", notes)
    if not train:
        raise DataError(f"env.dataset={cfg.env.dataset!r}: the function returned no row for split='train'")
    name = cfg.env.dataset
    splits = sources.Splits(train, _rows(cfg, "test", notes), f"{name} (train)", notes)
    return problems.build(cfg, splits, example)


def _rows(cfg: Config, split: str, notes: list[str]) -> list[sources.Row] | None:
    spec, arguments = cfg.env.dataset, dict(cfg.env.task_args)
    function = user_code.load(spec, "env.dataset")
    takes_split = "split" in user_code.signature(function, "env.dataset").parameters
    user_code.check_arguments(function, arguments, "env.task_args")
    if takes_split:
        arguments["split"] = split
    elif split != "train":
        return None
    try:
        returned = function(**arguments)
        rows = None if returned is None else _read(cfg, returned, notes, f"{spec!r} (split={split!r})")
    except UserError:
        raise
    except Exception as error:
        raise ConfigError(
            f"env.dataset={spec!r}: calling it with {arguments!r} failed: {user_code.describe(error)}; "
            "correct the function, or env.task_args"
        ) from error
    return rows or None


def _read(cfg: Config, returned: Any, notes: list[str], which: str) -> list[sources.Row]:
    what = f"env.dataset={which}"
    if isinstance(returned, str | Mapping) or not isinstance(returned, Iterable):
        raise DataError(f"{what} returned {type(returned).__name__}, not a list of rows")
    limit = streams.rows_to_read(cfg, returned)
    rows = list(itertools.islice(returned, _MOST_ROWS + 1 if limit is None else limit))
    if len(rows) > _MOST_ROWS:
        raise DataError(
            f"{what} returned more than {_MOST_ROWS} rows; let it end, or write env.shuffle_buffer=10000"
        )
    if limit is not None and len(rows) == limit:
        notes.append(streams.note(what, limit))
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise DataError(
                f"{what} returned {row!r:.80} as row {number}, not a mapping of columns; write e.g. "
                '{"question": ..., "answer": ...}'
            )
    return [sources.Row(dict(row), number, what) for number, row in enumerate(rows, 1)]
