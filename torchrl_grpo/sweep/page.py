"""``sweep.html``: the comparison of a sweep in one file, with the learning curves of its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchrl_grpo.observe.metrics import jsonable
from torchrl_grpo.report.page_file import fill
from torchrl_grpo.runtime.files.shared_files import replace
from torchrl_grpo.sweep import results, statistics
from torchrl_grpo.sweep.trials import Trial, settings

PAGE = "sweep.html"


def write(folder: Path, trials: Sequence[Trial], entries: Mapping[str, Any]) -> Path:
    """Write ``sweep.html``.

    Args:
        folder: folder of the sweep.
        trials: its trials.
        entries: their comparison, see :func:`~torchrl_grpo.sweep.results.results`.

    Raises:
        OSError: it cannot be written.
    """
    metric = entries["metric"] or "eval/primary"
    content = {
        "name": folder.resolve().name,
        "table": results.table(entries),
        "verdict": results.verdict(entries),
        "trials": entries["trials"],
        "curves": [_curve(name, metric, group) for name, group in settings(trials).items()],
    }
    path = folder / PAGE
    replace(path, fill("sweep.html", ["data.js", "curves.js", "sweep.js"], {"sweep": jsonable(content)}))
    return path


def _curve(name: str, metric: str, group: Sequence[Trial]) -> dict[str, Any]:
    """Return the mean over seeds at each step that all trials of a setting have reached, and its interval."""
    shared = set[int]().union(*(trial.steps for trial in group)).intersection(*(t.steps for t in group))
    steps = sorted(shared)
    metrics: dict[str, list[float | None]] = {metric: []}
    by_step = [dict(zip(trial.steps, trial.values, strict=True)) for trial in group]
    for step in steps:
        values = np.array([[by_trial[step]] for by_trial in by_step])
        metrics[metric].append(float(values.mean()))
        if len(values) > 1:
            mean, half = statistics.interval(values)
            metrics.setdefault(f"{metric}_low", []).append(float(mean - half))
            metrics.setdefault(f"{metric}_high", []).append(float(mean + half))
    return {"name": name, "steps": steps, "metrics": metrics}
