"""What differs between runs: configuration, versions, and results on the same held-out problems.

The first run is the one that the others are compared with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl_grpo.report.about import all_settings
from torchrl_grpo.report.comparison import Comparison
from torchrl_grpo.report.reader import CHARACTERS, MOST_ROLLOUTS, RunReader

# A key whose value may be a secret or a path in one of the runs.
_HIDDEN = {"value": "(not shown)", "overridden": False, "changed": False}


def read_runs(run_dirs: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the contents of the reports of runs, together within the bounds of a single one.

    Each has a name of its own, with as much of the path as it takes.

    Raises:
        OSError: a file cannot be read.
    """
    contents = []
    for run_dir, name in zip(run_dirs, _names(run_dirs), strict=True):
        reader = RunReader(run_dir, MOST_ROLLOUTS // len(run_dirs), CHARACTERS // len(run_dirs))
        reader.update()
        contents.append({**reader.contents(), "name": name})
    return contents


def compare(run_dirs: Sequence[Path], contents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what differs between runs, as JSON.

    Args:
        run_dirs: folders of the runs, two or more.
        contents: what :func:`read_runs` returns.

    Raises:
        OSError: a file cannot be read.
    """
    # Their values may be secrets, so only names of keys get into the result.
    settings = [all_settings(run_dir) for run_dir in run_dirs]
    budget = CHARACTERS // 3 // len(run_dirs)
    return {
        "settings": _settings(contents, settings),
        "surroundings": _surroundings(contents),
        "comparisons": [
            {
                "run": run,
                **Comparison(
                    (run_dirs[0], run_dirs[run]),
                    (contents[0], contents[run]),
                    differing([settings[0], settings[run]]) if settings[0] and settings[run] else None,
                ).entries(budget),
            }
            for run in range(1, len(run_dirs))
        ],
    }


def _names(run_dirs: Sequence[Path]) -> list[str]:
    parts = [run_dir.resolve().parts for run_dir in run_dirs]
    candidates = (["/".join(part[-depth:]) for part in parts] for depth in range(1, max(map(len, parts)) + 1))
    # Folders of a sweep have numbers as names.
    return next(n for n in candidates if len({*n}) == len(n) and not any(name.isdigit() for name in n))


def _settings(contents: Sequence[Mapping[str, Any]], settings: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Return the keys whose values differ among the runs that have a record of their configuration."""
    recorded = [bool(each) for each in settings]
    shown = [{row["key"]: row for row in run["about"]["config"]} for run in contents]
    rows = []
    for key in sorted({key for rows_of in shown for key in rows_of}):
        cells = [
            rows_of.get(key) or (_HIDDEN if key in each else None)
            for rows_of, each in zip(shown, settings, strict=True)
        ]
        if _differ([cell and cell["value"] for cell, known in zip(cells, recorded, strict=True) if known]):
            rows.append({"key": key, "cells": cells})
    visible = {row["key"] for row in rows}
    hidden = [
        key
        for key in differing([each for each in settings if each])
        if not any(other == key or other.startswith(f"{key}.") for other in visible)
    ]
    names = [run["name"] for run, known in zip(contents, recorded, strict=True) if not known]
    return {"rows": rows, "hidden": hidden, "unrecorded": names}


def _surroundings(contents: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what of versions, machine and plan of devices differs, where all runs have a record of it."""
    abouts = [run["about"] for run in contents]
    versions = [about["versions"] for about in abouts if about["versions"]]
    rows = []
    for name in dict.fromkeys(name for each in versions for name in each):
        if _differ([each.get(name) for each in versions]):
            values = [str(about["versions"].get(name, "")) for about in abouts]
            rows.append({"key": str(name), "cells": values})
    for name, title in (("machine", "machine"), ("plan", "devices")):
        if _differ([about[name] for about in abouts if about[name]]):
            rows.append({"key": title, "cells": [about[name] for about in abouts]})
    return rows


def _differ(values: Sequence[Any]) -> bool:
    return any(value != values[0] for value in values)


def differing(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the keys that have not the same value in all configurations."""
    every = sorted({key for each in settings for key in each})
    return [key for key in every if _differ([each.get(key) for each in settings])]
