"""What ``grpo-eval`` writes: its results, the responses, and the results in the form of lm-eval."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchrl_grpo.observe.metrics import jsonable
from torchrl_grpo.observe.stats import design_effect, mean_interval, paired_interval
from torchrl_grpo.runtime.package_versions import versions

RESULTS, RESPONSES, LM_EVAL = "evaluation.json", "responses.jsonl", "lm_eval.json"


@dataclass(frozen=True)
class Measured:
    """An evaluated model.

    Attributes:
        name: what the user wrote.
        metrics: the metrics ``eval/*``.
        rows: a mapping for each response to a held-out problem, with ``id``, and with ``grade`` unless a
            judge failed on it. Where ``grade`` is the loss of a solution, ``tokens`` is its number of tokens.
    """

    name: str
    metrics: Mapping[str, float]
    rows: Sequence[Mapping[str, Any]] = field(repr=False)

    @property
    def primary(self) -> tuple[float, tuple[float, float] | None]:
        """Accuracy, mean of what grades, or loss of solutions per token, with its 95 % interval."""
        names = ("eval/accuracy", "eval/primary", "eval/loss")
        name = next(name for name in names if name in self.metrics)
        if name == "eval/loss":
            return self.metrics[name], mean_interval(*zip(*_by_question(self).values(), strict=True))
        bounds = [self.metrics.get(f"{name}_{end}") for end in ("low", "high")]
        low, high = bounds
        return self.metrics[name], None if low is None or high is None else (low, high)

    @property
    def num_problems(self) -> int:
        """Number of held-out problems, which may have several responses each."""
        return int(self.metrics["eval/num_problems"])


def difference(model: Measured, other: Measured) -> tuple[float, tuple[float, float]]:
    """Return the difference of two models on the same problems, and its paired 95 % interval.

    Problems count alike. Losses are per token, as those of the models: a problem counts by its tokens.
    """
    results = [_by_question(each) for each in (model, other)]
    # The problems are those of one configuration, but a judge may have failed on some.
    paired = [[each[id] for each in results] for id in results[0] if id in results[1]]
    return paired_interval(
        [(first[0], second[0]) for first, second in paired],
        [(first[1], second[1]) for first, second in paired],
        [first[2] for first, _ in paired],
    )


def _by_question(model: Measured) -> dict[str, tuple[float, float, str]]:
    """Return the mean grade of each question over its responses, its weight and its problem."""
    grades: dict[str, list[float]] = {}
    tokens: dict[str, float] = {}
    problems: dict[str, str] = {}
    for row in model.rows:
        if "grade" not in row:
            continue
        grades.setdefault(row["id"], []).append(row["grade"])
        # The loss of a solution is a mean over its tokens.
        tokens[row["id"]] = row.get("tokens", 1)
        problems[row["id"]] = row.get("problem", row["id"])
    return {id: (sum(values) / len(values), tokens[id], problems[id]) for id, values in grades.items()}


def write(folder: Path, task: str, config: Mapping[str, Any], models: Sequence[Measured]) -> None:
    """Write the three files.

    Args:
        folder: existing folder.
        task: name of the task.
        config: configuration of the evaluation.
        models: one model, or two to compare.
    """
    entries: dict[str, Any] = {"task": task, "models": {}, "versions": versions()}
    for model in models:
        value, bounds = model.primary
        entries["models"][model.name] = {"value": value, "ci95": bounds, "metrics": model.metrics}
    if len(models) == 2:
        mean, bounds = difference(*models)
        entries["difference"] = {"value": mean, "ci95": bounds}
    entries["config"] = config
    _write(folder / RESULTS, entries)
    with (folder / RESPONSES).open("w") as file:
        for model in models:
            file.writelines(f"{json.dumps({'model': model.name, **jsonable(row)})}\n" for row in model.rows)
    _write(folder / LM_EVAL, lm_eval(task, config, models[0]))


def lm_eval(task: str, config: Mapping[str, Any], model: Measured) -> dict[str, Any]:
    """Return the results of a model as ``lm_eval --output_path`` writes them."""
    count = model.num_problems
    results: dict[str, Any] = {"alias": task}
    for name, value in model.metrics.items():
        short = name.removeprefix("eval/")
        if short.endswith(("_low", "_high")):
            continue
        is_primary = name in ("eval/accuracy", "eval/primary")
        # lm-eval calls it so.
        short = {"accuracy": "acc"}.get(short, short)
        results[f"{short},none"] = value
        results[f"{short}_stderr,none"] = _standard_error(model) if is_primary else "N/A"
    return {
        "results": {task: results},
        "group_subtasks": {task: []},
        "configs": {task: {"task": task, "metadata": {"torchrl_grpo": config}}},
        "versions": {task: versions()["torchrl-grpo"]},
        "n-shot": {task: 0},
        "higher_is_better": {task: {"acc": True}},
        "n-samples": {task: {"original": count, "effective": count}},
        "config": {"model": "torchrl-grpo", "model_args": f"pretrained={model.name}", "gen_kwargs": {}},
        "model_name": model.name,
        "model_source": "torchrl-grpo",
        "date": time.time(),
    }


def _standard_error(model: Measured) -> float | str:
    questions = _by_question(model).values()
    values, problems = [grade for grade, *_ in questions], [problem for *_, problem in questions]
    if len({*problems}) < 2:
        return "N/A"
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values)
    return math.sqrt(variance * design_effect(values, problems))


def _write(path: Path, entries: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(jsonable(entries), indent=2, allow_nan=False) + "\n")
