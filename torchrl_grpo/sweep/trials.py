"""Reads the trials of a sweep from their folders: setting, seed, held-out values and grades.

A trial is an ordinary run. Only its files are read, so any launcher may have started it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchrl_grpo.checkpoints.run_dir import SET_ASIDE
from torchrl_grpo.config.public import public_overrides
from torchrl_grpo.observe.held_out import held_out, held_out_metric
from torchrl_grpo.observe.metrics import EVALUATIONS, METRICS
from torchrl_grpo.observe.report import of_ended_run
from torchrl_grpo.report.columns import number
from torchrl_grpo.report.lines import GrowingFile
from torchrl_grpo.runtime.files.run_records import DAMAGED, read_yaml

# Written into the folder of a trial that the sweep has ended early.
STOPPED = "stopped_early.json"
ENDED, STOPPED_EARLY, UNFINISHED = "ended", "stopped early", "unfinished"
# Name of a setting that differs from no other.
DEFAULTS = "(one setting)"
# Keys that no setting differs in: the seed is an axis of its own, and the others say where and how to run.
_NOT_COMPARED = ("seed", "resume", "sweep", "hydra", "logging", "dry_run")
# Largest difference between a mean of grades and the metric that it is, for rounding.
_ROUNDING = 1e-5


@dataclass
class Trial:
    """A trial.

    Attributes:
        name: name of its folder.
        overrides: its overrides by key, without the seed.
        seed: its seed.
        state: ``ended``, ``stopped early`` or ``unfinished``.
        metric: name of the held-out metric; empty before the first evaluation.
        steps: steps of the evaluations.
        values: held-out value of each; larger is better.
        bounds: 95 % interval of each over problems.
        grades: mean grade of each held-out question in the last evaluation; empty if they are not recorded.
        problems: the problem of these questions, where others word it too.
        last_step: last step of the metrics.
    """

    name: str
    overrides: dict[str, str]
    seed: int
    state: str = UNFINISHED
    metric: str = ""
    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    bounds: list[tuple[float, float]] = field(default_factory=list)
    grades: dict[str, float] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    last_step: int = -1

    @property
    def final(self) -> float | None:
        """Held-out value at the end; None before it, and if that value was not finite, as a diverged loss."""
        is_last = self.state == STOPPED_EARLY or (self.state == ENDED and self.steps[-1:] == [self.last_step])
        return self.values[-1] if is_last and self.values else None


def read_sweep(folder: Path) -> list[Trial]:
    """Read the trials of a sweep, in the order of their numbers.

    Args:
        folder: folder of the sweep.

    Raises:
        OSError: a file cannot be read.
    """
    # A trial without a checkpoint begins again, and what it had is set aside.
    folders = [path.parent for path in folder.glob(f"*/{METRICS}") if SET_ASIDE not in path.parent.name]
    return [read_trial(path) for path in sorted(folders, key=lambda path: (len(path.name), path.name))]


def read_trial(folder: Path, *, with_grades: bool = True) -> Trial:
    """Read a trial.

    Args:
        folder: folder of the run.
        with_grades: whether to read the grades of the problems too.

    Raises:
        OSError: a file cannot be read.
    """
    config = _yaml(folder / ".hydra/config.yaml")
    pairs = (word.lstrip("+").partition("=") for word in recorded_overrides(folder) or ())
    overrides = {key: value for key, _, value in pairs if key.split(".")[0] not in _NOT_COMPARED}
    seed = config.get("seed") if isinstance(config, dict) else None
    trial = Trial(folder.name, overrides, seed if type(seed) is int else 0)
    for row in GrowingFile(folder / METRICS).new_lines(skip_falls=True):
        trial.last_step = row["step"]
        finite = {name: value for name, value in row.items() if math.isfinite(number(value))}
        if (result := held_out(finite)) is not None:
            # A mean may be an accuracy in some of the trials. It is then a mean in all of them.
            trial.metric = "eval/primary" if "eval/primary" in finite else held_out_metric(finite)
            trial.steps.append(row["step"])
            trial.values.append(result.value)
            trial.bounds.append((result.low, result.high))
    if of_ended_run(folder, trial.last_step) is not None:
        trial.state = ENDED
    elif (folder / STOPPED).is_file():
        trial.state = STOPPED_EARLY
    if trial.steps and with_grades:
        trial.grades, trial.problems = _grades(folder / EVALUATIONS, trial.steps[-1], trial.values[-1])
    return trial


def recorded_overrides(folder: Path) -> list[str] | None:
    """Return the overrides with which a trial was started; None if its record is missing or damaged.

    Raises:
        OSError: it cannot be read.
    """
    words = _yaml(folder / ".hydra/overrides.yaml")
    return [word for word in words if isinstance(word, str)] if isinstance(words, list) else None


def settings(trials: Sequence[Trial]) -> dict[str, list[Trial]]:
    """Group trials by their setting, in the order of the first trial of each.

    A setting is named by the overrides that are not the same in all trials. Of values that may be secret, the
    name has a number.
    """
    columns: dict[str, list[str]] = {}
    for key in dict.fromkeys(key for trial in trials for key in trial.overrides):
        values = [trial.overrides.get(key) for trial in trials]
        if len(set(values)) > 1:
            columns[key] = [_named(key, value, values) for value in values]
    groups: dict[str, list[Trial]] = {}
    for at, trial in enumerate(trials):
        words = [words[at] for words in columns.values() if words[at]]
        groups.setdefault(" ".join(words) or DEFAULTS, []).append(trial)
    return groups


def metric_of(trials: Sequence[Trial]) -> str:
    """Return the held-out metric of the first trial that has one; empty without any."""
    return next((trial.metric for trial in trials if trial.metric), "")


def _named(key: str, value: str | None, values: Sequence[str | None]) -> str:
    if value is None:
        return ""
    word = f"{key}={value}"
    return word if public_overrides([word]) else f"{key}=(value {list(dict.fromkeys(values)).index(value)})"


def _yaml(path: Path) -> Any:
    try:
        return read_yaml(path)
    except (FileNotFoundError, *DAMAGED):
        # The folder may be a copy of the measurements alone.
        return None


def _grades(path: Path, step: int, value: float) -> tuple[dict[str, float], dict[str, str]]:
    """Return the mean grade of each question at a step, and the problems that rows name.

    Both are empty if the mean of the grades is not the held-out value. That of a loss counts questions by
    their tokens.
    """
    grades: dict[str, list[float]] = {}
    problems: dict[str, str] = {}
    for row in GrowingFile(path).new_lines(skip_falls=True):
        if row["step"] == step and math.isfinite(grade := number(row.get("grade"))):
            id = json.dumps(row.get("id"))
            grades.setdefault(id, []).append(grade)
            if isinstance(name := row.get("problem"), str):
                problems[id] = json.dumps(name)
    means = {id: sum(values) / len(values) for id, values in grades.items()}
    is_value = bool(means) and abs(sum(means.values()) / len(means) - value) < _ROUNDING
    return (means, problems) if is_value else ({}, {})
