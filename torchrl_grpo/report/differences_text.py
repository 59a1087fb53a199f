"""What differs between runs, for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Keys of the configuration, and characters of a value. The page has the rest.
_MOST_KEYS, _WIDEST = 30, 32


def lines(contents: Sequence[Mapping[str, Any]], differences: Mapping[str, Any]) -> Iterator[str]:
    """Return the lines.

    Args:
        contents: contents of the runs' reports, the first run first.
        differences: what :func:`~torchrl_grpo.report.differences.compare` returns.
    """
    names = [str(run["name"]) for run in contents]
    for run in contents:
        for file, count in run["damaged"].items():
            yield f"{run['name']}: damaged lines of {file} that were skipped: {count}"
    yield from _settings(names, differences["settings"])
    if differences["surroundings"]:
        different = ", ".join(row["key"] for row in differences["surroundings"])
        yield f"Versions and machine differ: {different}."
    for comparison in differences["comparisons"]:
        yield ""
        yield from _comparison(names[0], names[comparison["run"]], comparison)
    yield ""


def _settings(names: Sequence[str], settings: Mapping[str, Any]) -> Iterator[str]:
    rows, hidden, unrecorded = settings["rows"], settings["hidden"], settings["unrecorded"]
    if unrecorded:
        yield f"No record of the configuration: {', '.join(unrecorded)}."
    if not rows and not hidden and len(unrecorded) < len(names) - 1:
        yield "The configurations are equal."
    if rows:
        yield f"Keys that differ: {len(rows)} (* set by the command)"
        cells = [[row["key"], *map(_value, row["cells"])] for row in rows[:_MOST_KEYS]]
        yield from _table([["", *names], *cells])
    if len(rows) > _MOST_KEYS:
        yield f"  and {len(rows) - _MOST_KEYS} more keys, which are in the page"
    if hidden:
        yield f"These differ too, and their values may be secrets or paths: {', '.join(hidden)}."


def _value(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "-"
    value = str(cell["value"])
    short = value if len(value) <= _WIDEST else f"{value[: _WIDEST - 3]}..."
    return f"{short} *" if cell["overridden"] else short


def _comparison(first: str, second: str, comparison: Mapping[str, Any]) -> Iterator[str]:
    yield f"Held-out problems, {second} minus {first}"
    for note in comparison["notes"]:
        yield f"  {note}"
    for moment in comparison["moments"]:
        before, after = moment["steps"]
        places = (
            f"step {before}" if before == after else f"step {before} of {first}, step {after} of {second}"
        )
        yield f"  {places}, {moment['shared']} problems in both"
        yield from _table([_metric(metric, moment["shared"]) for metric in moment["metrics"]], "    ")
        counts = Counter(problem["state"] for problem in moment["problems"])
        if counts:
            yield "    " + ", ".join(f"{state}: {count}" for state, count in sorted(counts.items()))


def _metric(metric: Mapping[str, Any], shared: int) -> list[str]:
    low, high = metric["low"], metric["high"]
    interval = "" if low is None else f"(95 % interval {low:+.3f} to {high:+.3f})"
    of = "" if metric["problems"] == shared else f"on {metric['problems']} of them"
    means = f"{metric['first']:.3f} -> {metric['second']:.3f}"
    return [metric["name"], f"{metric['difference']:+.3f}", interval, means, of]


def _table(rows: Sequence[Sequence[str]], indent: str = "  ") -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield indent + "  ".join(padded).rstrip()
