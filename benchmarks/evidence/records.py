"""What an experiment keeps of a run: how it was started, its curve, and the grade of each held-out problem.

A record has what the tables need, so they can be computed again without the run.
"""

from __future__ import annotations

import json
import lzma
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence import policies
from benchmarks.evidence.experiment import Experiment
from benchmarks.learning import Stage
from torchrl_grpo.observe import doctor
from torchrl_grpo.observe.metrics import EVALUATIONS, METRICS, ROLLOUTS, read_jsonl
from torchrl_grpo.runtime.files.run_records import read_yaml
from torchrl_grpo.sweep.trials import read_trial, recorded_overrides

_ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent / "records"
RESPONSES = Path(__file__).resolve().parent / "responses"
_SAMPLES = 4
# What all records of an experiment have in common: ids of the held-out questions, and the number of the
# problem of each.
_SHARED = ("ids", "problems")
_ABSOLUTE = re.compile(r"(?<![\w./])(/[\w.+-]+){2,}")


def read_record(
    experiment: Experiment, arm: str, seed: int, runs: Sequence[Path], base: Path
) -> dict[str, Any]:
    """Return the record of an arm that has ended.

    Args:
        experiment: what the arm is of.
        arm: name of the arm.
        seed: its seed.
        runs: folders of its runs, of which each began with the model of the one before.
        base: run that evaluated the model that the arm began with, before its first step.

    Raises:
        OSError: a run is missing.
        ValueError: the runs have no evaluations that can be compared.
    """
    last = runs[-1]
    trial = read_trial(last)
    rows_before, rows_after = _rows(base, 0), _rows(last, trial.last_step)
    before, after = (_graded(rows, experiment.shape) for rows in (rows_before, rows_after))
    if not after or before.keys() != after.keys():
        raise ValueError(f"{last}: the evaluations before and after training are not of the same problems")
    summaries = [json.loads((run / "summary.json").read_text()) for run in runs]
    about = json.loads((last / ".hydra/about.json").read_text())
    ids = sorted(after)
    if trial.steps[0] > 0:
        # It was not evaluated before its first step: an earlier run has that value.
        trial.steps.insert(0, 0)
        trial.values.insert(
            0, read_trial(runs[-2]).values[-1] if len(runs) > 1 else read_trial(base).values[0]
        )
    record: dict[str, Any] = {
        "arm": arm,
        "seed": seed,
        "commands": [
            _command(stage, run, base.parents[2])
            for stage, run in zip(experiment.arms[arm], runs, strict=True)
        ],
        "versions": about["versions"],
        "machine": about["machine"],
        "started": about["started"],
        "seconds": [summary["seconds"] for summary in summaries],
        "responses": [summary["dialog_turns"] for summary in summaries],
        "findings": [finding.rule.name for run in runs for finding in doctor.findings(run)],
        "metric": trial.metric,
        "steps": trial.steps,
        "values": trial.values,
        "clock": _clock(last, trial.steps),
        "ids": ids,
        "problems": _problems(rows_after),
        "before": [before[id][0] for id in ids],
        "after": [after[id][0] for id in ids],
    }
    if ages := [row["policy/age_mean"] for row in _steps(last) if "policy/age_mean" in row]:
        record["age"] = sum(ages) / len(ages)
    if experiment.keeps_samples:
        record["samples"] = _samples(rows_before, rows_after)
    if experiment.shape:
        record["formed"] = [sum(each[id][1] for id in ids) / len(ids) for each in (before, after)]
    first, final = _passes(base), _passes(last)
    if first and final:
        record["passes"] = [first[0], final[-1]]
    if experiment.policies and (arm, seed) == (next(iter(experiment.arms)), 0):
        record["policies"] = policies.grades(base, ids, experiment.policies)
    responses = [{row["id"]: row["response"] for row in rows} for rows in (rows_before, rows_after)]
    if experiment.deals:
        record["dealt"] = [policies.dealt(base, each) for each in responses]
        record["repetitive"] = [[int(policies.is_repetitive(each[id])) for id in ids] for each in responses]
    if experiment.measures:
        scores = [policies.scores(base, each, experiment.measures) for each in responses]
        record["measures"] = {name: [each[name] for each in scores] for name in experiment.measures}
        record["weights"] = policies.weights(base, ids, experiment.measures)
    return record


def _problems(rows: Sequence[dict[str, Any]]) -> list[int]:
    """Return the number of each question's problem, in the order of their ids. Wordings of one share it."""
    names = {row["id"]: row.get("problem", row["id"]) for row in rows}
    keys = [names[id] for id in sorted(names)]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [numbers[key] for key in keys]


def _command(stage: Stage, run: Path, folder: Path) -> str:
    """Return the command of a run, as it is written in the root of this project.

    Args:
        stage: what the command is of.
        run: folder of the run.
        folder: folder of all runs.
    """
    job = read_yaml(run / ".hydra/hydra.yaml")["hydra"]["job"]
    words = [word for word in recorded_overrides(run) or () if not word.startswith(("hydra.", "logging."))]
    text = shlex.join(["python", stage.script, f"--config-name={job['config_name']}", *words])
    return _ABSOLUTE.sub(_of_project, text.replace(f"{folder}/", "FOLDER/"))


def _of_project(path: re.Match[str]) -> str:
    """Return an absolute path from the root of this project, whose copy may have been elsewhere.

    Other paths of the machine concern nobody else.
    """
    parts = Path(path[0]).parts
    ends = (Path(*parts[start:]) for start in range(1, len(parts) - 1))
    return next((str(end) for end in ends if (_ROOT / end).exists()), "PATH")


def _clock(run: Path, steps: Sequence[int]) -> list[float]:
    """Return the seconds of a run's steps up to each of ``steps``, without start and evaluations."""
    spent = {row["step"]: row["time/step_s"] - row.get("time/eval_s", 0.0) for row in _steps(run)}
    return [sum(seconds for at, seconds in spent.items() if at <= step) for step in steps]


def _steps(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(run / METRICS) if "time/step_s" in row]


def _passes(run: Path) -> list[float]:
    """Return pass@k of each evaluation that measured it."""
    rows = read_jsonl(run / METRICS)
    return [value for row in rows for name, value in row.items() if name.startswith("eval/pass_at_")]


def _rows(run: Path, step: int) -> list[dict[str, Any]]:
    """Return the graded responses of an evaluation."""
    return [
        row for row in read_jsonl(run / EVALUATIONS) if row["step"] == step and row.get("grade") is not None
    ]


def _graded(rows: Sequence[dict[str, Any]], shape: str) -> dict[str, tuple[float, float]]:
    """Return the mean grade of each problem, and the share of its responses in the right form."""
    grades: dict[str, list[float]] = {}
    formed: dict[str, list[bool]] = {}
    for row in rows:
        grades.setdefault(row["id"], []).append(row["grade"])
        formed.setdefault(row["id"], []).append(re.fullmatch(shape, row["response"].strip()) is not None)
    return {id: (sum(values) / len(values), sum(formed[id]) / len(values)) for id, values in grades.items()}


def _samples(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the first questions of an evaluation, each with a response before and after training."""
    responses = [{row["id"]: row["response"] for row in rows} for rows in (before, after)]
    questions = {row["id"]: policies.question_of(row["prompt"]) for row in before}
    first = list(questions)[:_SAMPLES]
    return [[questions[id], *(each[id] for each in responses)] for id in first]


def save_responses(name: str, runs: Sequence[Path], folder: Path = RESPONSES) -> None:
    """Write all responses of an arm's last run, sampled and held-out, as lines of JSON in an xz file.

    Each has the name of its file in ``file``, and what that file says of it.

    Args:
        name: name of the experiment.
        runs: folders of the runs. The parent of the last one has the name of the arm and its seed.
        folder: folder of the responses of all experiments.
    """
    path = folder / name / f"{runs[-1].parent.name}.jsonl.xz"
    path.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(path, "wt", encoding="utf-8", preset=9) as file:
        for source in (ROLLOUTS, EVALUATIONS):
            for row in read_jsonl(runs[-1] / source) if (runs[-1] / source).is_file() else ():
                file.write(f"{json.dumps({'file': source, **row})}\n")


def load(name: str, folder: Path = FOLDER) -> list[dict[str, Any]]:
    """Return the records of an experiment; none if it was not run."""
    path = folder / f"{name}.json"
    if not path.is_file():
        return []
    content = json.loads(path.read_text())
    shared = {key: content[key] for key in _SHARED}
    return [{**record, **shared} for record in content["runs"]]


def compared(name: str, known: dict[str, Any], record: dict[str, Any]) -> str:
    """Return the line that says whether a repeated run came out the same.

    Args:
        name: name of the experiment.
        known: record that is kept of the arm and seed.
        record: that of the new run.
    """
    words = f"{name}, {record['arm']}, seed {record['seed']}"
    if known["ids"] != record["ids"]:
        return f"{words}: the held-out problems are not those of the record\n"
    count = sum(old != new for old, new in zip(known["after"], record["after"], strict=True))
    outcome = f"{count} of {len(record['after'])} grades differ from" if count else "all grades are those of"
    return f"{words}: {outcome} the record\n"


def save(name: str, records: Sequence[dict[str, Any]], folder: Path = FOLDER) -> None:
    """Write the records of an experiment, one a line. What all share is written once.

    Raises:
        ValueError: two runs were not measured on the same problems.
    """
    ids, path = records[0]["ids"], folder / f"{name}.json"
    if any(record["problems"] != records[0]["problems"] for record in records):
        raise ValueError(
            f"{path}: not all runs name the same problems of their questions, so they are not compared; move "
            "this file away to begin a record of your own"
        )
    if others := {id for record in records for id in set(record["ids"]) ^ set(ids)}:
        raise ValueError(
            f"{path}: not all runs were measured on the same problems ({len(others)} are not in all), so "
            "they are not compared; move this file away to begin a record of your own"
        )
    folder.mkdir(exist_ok=True)
    shared = ",\n".join(f'"{key}": {json.dumps(records[0][key])}' for key in _SHARED)
    rows = [
        json.dumps({key: value for key, value in record.items() if key not in _SHARED}) for record in records
    ]
    lines = ",\n".join(rows)
    path.write_text(f'{{{shared},\n"runs": [\n{lines}\n]}}\n')
