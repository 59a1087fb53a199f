"""Results of the stages: a file that is rewritten after each stage, and a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from torchrl_grpo.planning.plan import aligned
from torchrl_grpo.runtime.files.shared_files import replace

# Longest reason in the table; the file has the whole one.
_REASON = 100


class Status(StrEnum):
    """How a stage ended."""

    passed = "passed"
    failed = "failed"
    skipped = "skipped"


@dataclass(frozen=True)
class Result:
    """Result of a stage.

    Attributes:
        stage: name of the stage.
        status: how it ended.
        seconds: how long it took.
        figures: what it measured, by name with the unit at its end.
        reason: why it failed or was skipped.
    """

    stage: str
    status: Status
    seconds: float = 0.0
    figures: Mapping[str, float | str] = field(default_factory=dict)
    reason: str = ""


def write(path: Path, results: Sequence[Result]) -> None:
    """Write the results so far; a reader never sees half of a file."""
    replace(path, json.dumps([asdict(result) for result in results], indent=1) + "\n")


def line(result: Result) -> str:
    """Return what is printed when a stage has ended."""
    details = "; ".join(part for part in (_figures(result), result.reason[:_REASON]) if part)
    return f"{result.stage:<12} {result.status:<8} {result.seconds:5.0f} s  {details}".rstrip()


def table(results: Sequence[Result]) -> str:
    """Return all results as aligned lines."""
    rows = [("stage", "result", "seconds", "figures")]
    for result in results:
        details = _figures(result) or result.reason[:_REASON]
        rows.append((result.stage, result.status, f"{result.seconds:.0f}", details))
    return aligned(rows, numbers=frozenset({2}))


def _figures(result: Result) -> str:
    shown = {name: f if isinstance(f, str) else f"{f:.4g}" for name, f in result.figures.items()}
    return ", ".join(f"{name} {figure}" for name, figure in shown.items())
