"""How many rows are read of a data set that streams, which may have no end.

All of them are read before the run starts, as those of a file are. So a problem is never trained on and held
out, every epoch is shuffled as a whole, and a resumed run draws as before if the stream begins as it did.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torchrl_grpo.config import Config
from torchrl_grpo.config.derived import held_out_problems, total_turns
from torchrl_grpo.config.keys import bad_value

# Rows that are read beyond those that the run draws.
_AHEAD = 10_000


def rows_to_read(cfg: Config, rows: Iterable[Any]) -> int | None:
    """Return how many rows of an iterable are read; None for all.

    An iterator is read to its end unless ``env.shuffle_buffer`` is set, and so is what has a length. Other
    iterables begin anew each time that they are read, as data sets that stream do.

    Raises:
        ConfigError: the length of the run depends on that of the stream.
    """
    ahead = cfg.env.shuffle_buffer
    if hasattr(rows, "__len__") or (ahead is None and hasattr(rows, "__next__")):
        return None
    return of_stream(cfg)


def of_stream(cfg: Config) -> int:
    """Return how many rows of a stream are read: those that the run may draw and hold out, and further ones.

    Raises:
        ConfigError: the length of the run depends on that of the stream.
    """
    if cfg.train.num_epochs is not None:
        wrong = "a stream is not read to its end, so it has no epochs"
        fix = "train.total_dialog_turns=64000 train.num_epochs=null"
        raise bad_value("train.num_epochs", cfg.train.num_epochs, wrong, fix)
    refills = cfg.policy.max_refills if cfg.policy.constant_groups == "refill" else 0
    drawn = math.ceil(total_turns(cfg) / cfg.env.repeats) * (1 + refills)
    ahead = _AHEAD if cfg.env.shuffle_buffer is None else cfg.env.shuffle_buffer
    return drawn + held_out_problems(cfg) + ahead


def note(what: str, read: int) -> str:
    """Return a message that a stream was not read to its end."""
    return f"{what} is a stream, of which the first {read} rows are read (env.shuffle_buffer)"
