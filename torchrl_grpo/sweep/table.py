"""The state of a sweep while it goes on: a live table on a terminal, and a line for each change elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from torchrl_grpo.sweep.trials import Trial

WAITING, RUNNING, FAILED = "waiting", "running", "failed"
# Rows of the table. Trials that run come first, and those that ended last are last.
_MOST_ROWS = 30
_ORDER = (RUNNING, FAILED, WAITING)


@dataclass
class Row:
    """What is shown of a trial.

    Attributes:
        name: name of its folder.
        words: its overrides.
        state: what it is doing.
        trial: what its files say; None before it has written any.
    """

    name: str
    words: str
    state: str = WAITING
    trial: Trial | None = None


class StateTable:
    """Shows rows while the context is open."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stdout)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._states: dict[str, str] = {}

    def __enter__(self) -> StateTable:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        # A terminal that has gone away must not hide how the sweep ended.
        with contextlib.suppress(BrokenPipeError):
            self._live.stop()

    def show(self, rows: Sequence[Row]) -> None:
        """Show the rows as they are now."""
        if self._console.is_terminal:
            self._live.update(_table(rows), refresh=True)
            return
        for row in rows:
            if self._states.get(row.name, WAITING) != row.state:
                sys.stdout.write(f"trial {row.name} ({row.words}): {row.state}{_value(row, ', ')}\n")
            self._states[row.name] = row.state
        sys.stdout.flush()


def _table(rows: Sequence[Row]) -> Table:
    counts = Counter(row.state for row in rows)
    caption = ", ".join(f"{count} {state}" for state, count in counts.items())
    table = Table(title="Sweep", caption=caption, box=None)
    for column in ("trial", "setting", "state", "step", "held-out"):
        table.add_column(column, overflow="fold")
    ranked = sorted(rows, key=lambda row: _ORDER.index(row.state) if row.state in _ORDER else len(_ORDER))
    for row in ranked[:_MOST_ROWS]:
        steps = row.trial.steps if row.trial is not None else []
        cells = (row.name, row.words, row.state, str(steps[-1]) if steps else "", _value(row, ""))
        # Text is data: square brackets in it are no markup.
        table.add_row(*map(Text, cells))
    return table


def _value(row: Row, before: str) -> str:
    values = row.trial.values if row.trial is not None else []
    return f"{before}{values[-1]:.3f}" if values else ""
