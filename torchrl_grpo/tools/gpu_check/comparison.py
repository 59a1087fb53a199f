"""Figures of two machines, or of two versions on one, side by side."""

from __future__ import annotations

import json
from pathlib import Path

from torchrl_grpo.errors import ConfigError
from torchrl_grpo.planning.plan import aligned
from torchrl_grpo.tools.gpu_check.results import Result, Status


def read(path: Path) -> dict[str, Result]:
    """Return the results of a file by stage.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        entries = [Result(**entry) for entry in json.loads(path.read_text())]
        return {entry.stage: Result(**{**vars(entry), "status": Status(entry.status)}) for entry in entries}
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"--compare {path}: it is no result of gpu-check ({error}); write the path of a gpu_check.json"
        ) from error


def compare(path: Path, other_path: Path) -> str:
    """Return a table of all figures of two files, with the second as a multiple of the first.

    Raises:
        ConfigError: a file cannot be read, or holds something else.
    """
    results, others = read(path), read(other_path)
    rows = [("stage", "figure", str(path), str(other_path), "ratio")]
    for stage in dict.fromkeys([*results, *others]):
        pair = [side.get(stage, Result(stage, Status.skipped)) for side in (results, others)]
        if {entry.status for entry in pair} != {Status.passed}:
            rows.append((stage, "result", pair[0].status, pair[1].status, ""))
        for name in dict.fromkeys([*pair[0].figures, *pair[1].figures]):
            figure, other = (entry.figures.get(name, "") for entry in pair)
            ratio = ""
            if not isinstance(figure, str) and not isinstance(other, str) and figure:
                ratio = f"{other / figure:.3g}"
            rows.append((stage, name, _shown(figure), _shown(other), ratio))
    return aligned(rows, numbers=frozenset({2, 3, 4}))


def _shown(figure: float | str) -> str:
    return figure if isinstance(figure, str) else f"{figure:.4g}"
