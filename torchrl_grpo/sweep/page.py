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
from torchrl_grpo.sweep.trials import Trial, metric_of, settings

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
    content = {
        "name": folder.resolve().name,
        "table": results.table(entries),
        "verdict": results.verdict(entries),
        "trials": entries["trials"],
        "curves": [_curve(name, group) for name, group in settings(trials).items()],
    }
    path = folder / PAGE
    replace(path, fill("sweep.html", ["data.js", "curves.js", "sweep.js"], {"sweep": jsonable(content)}))
    return path


def _curve(name: str, group: Sequence[Trial]) -> dict[str, Any]:
    """Return the mean over seeds at each step that all trials of a setting have reached, and its interval.

    Trials that have not been evaluated are left out.
    """
    group = [trial for trial in group if trial.steps]
    metric = metric_of(group) or "eval/primary"
    # Values are such that larger is better.
    sign = -1 if metric == "eval/loss" else 1
    steps = sorted({step for trial in group for step in trial.steps}.intersection(*(t.steps for t in group)))
    metrics: dict[str, list[float | None]] = {metric: []}
    by_step = [dict(zip(trial.steps, trial.values, strict=True)) for trial in group]
    for step in steps:
        values = sign * np.array([[by_trial[step]] for by_trial in by_step])
        metrics[metric].append(float(values.mean()))
        if len(values) > 1:
            mean, half = statistics.interval(values)
            metrics.setdefault(f"{metric}_low", []).append(float(mean - half))
            metrics.setdefault(f"{metric}_high", []).append(float(mean + half))
    return {"name": name, "steps": steps, "metrics": metrics}
