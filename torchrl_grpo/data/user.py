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
from torchrl_grpo.data import problems
from torchrl_grpo.data.jsonl import check_answers, example, field_names
from torchrl_grpo.data.rows import sources
from torchrl_grpo.errors import ConfigError, DataError
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
    field_names(cfg.env)
    train = _rows(cfg, "train")
    if not train:
        raise DataError(f"env.dataset={cfg.env.dataset!r}: the function returned no row for split='train'")
    name = cfg.env.dataset
    loaded = problems.build(cfg, sources.Splits(train, _rows(cfg, "test"), f"{name} (train)"), example)
    check_answers(loaded)
    return loaded


def _rows(cfg: Config, split: str) -> list[sources.Row] | None:
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
        rows = None if returned is None else _read(returned, f"env.dataset={spec!r} (split={split!r})")
    except DataError:
        raise
    except Exception as error:
        raise ConfigError(
            f"env.dataset={spec!r}: calling it with {arguments!r} failed: {user_code.describe(error)}; "
            "correct the function, or env.task_args"
        ) from error
    return rows or None


def _read(returned: Any, what: str) -> list[sources.Row]:
    if isinstance(returned, str | Mapping) or not isinstance(returned, Iterable):
        raise DataError(f"{what} returned {type(returned).__name__}, not a list of rows")
    rows = list(itertools.islice(returned, _MOST_ROWS + 1))
    if len(rows) > _MOST_ROWS:
        raise DataError(f"{what} returned more than {_MOST_ROWS} rows; let it end")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise DataError(
                f"{what} returned {row!r:.80} as row {number}, not a mapping of columns; write e.g. "
                '{"question": ..., "answer": ...}'
            )
    return [sources.Row(dict(row), number, what) for number, row in enumerate(rows, 1)]
