"""Finds what went wrong in a run, from its files alone. Lines that are damaged are skipped and counted."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from torchrl_grpo.errors import DataError
from torchrl_grpo.observe.guards import Finding, Guards
from torchrl_grpo.observe.metrics import EVALUATIONS, METRICS, ROLLOUTS
from torchrl_grpo.observe.past import Setting
from torchrl_grpo.runtime.files.run_records import DAMAGED, newest_record, read_yaml
from torchrl_grpo.runtime.files.shared_files import open_regular

_SUMMARY = "summary.json"
# Longest line that is read. A response has at most some hundred thousand tokens.
_LONGEST = 16 * 2**20


@dataclass(frozen=True)
class Example:
    """A response that shows what was found.

    Attributes:
        file: file that it is in.
        step: its step.
        response: text of the response, as the model wrote it.
        reward: its reward or grade; None if the file does not say it.
        error: error of a reward; empty without one.
    """

    file: str
    step: int
    response: str
    reward: float | None
    error: str


@dataclass(frozen=True)
class Diagnosis:
    """What was found in the files of a run.

    Attributes:
        findings: findings in the order in which they began, those that are over included.
        examples: a response to each finding by the name of its rule, where the files have one.
        last_step: last step of the metrics; None without any.
        ended: whether the run has ended.
        damaged: number of lines that were skipped, by file.
        notes: what could not be read besides.
    """

    findings: list[Finding]
    examples: Mapping[str, Example]
    last_step: int | None
    ended: bool
    damaged: Mapping[str, int]
    notes: list[str]


def findings(run_dir: str | os.PathLike[str]) -> list[Finding]:
    """Return what the rules find in a run, in the order in which it began.

    Raises:
        DataError: the folder has no metrics of a run, or they cannot be read.
    """
    return diagnose(run_dir).findings


def diagnose(run_dir: str | os.PathLike[str]) -> Diagnosis:
    """Apply the rules to the files of a run, which may still be going on.

    Args:
        run_dir: folder of the run.

    Raises:
        DataError: the folder has no metrics of a run, or they cannot be read.
    """
    folder, damaged, notes = Path(run_dir), dict[str, int](), list[str]()
    guards, begun, last = Guards(read_setting(folder, notes)), list[Finding](), None
    try:
        for row in _lines(folder / METRICS, damaged):
            if not all(value is None or _is_number(value) for value in row.values()):
                damaged[METRICS] = damaged.get(METRICS, 0) + 1
                continue
            begun += guards.take(row["step"], row)
            last = row["step"]
    except OSError as error:
        raise DataError(
            f"{folder}: no metrics of a run can be read there ({METRICS}: {error.strerror}); write the "
            "folder of a run, such as outputs/DATE/TIME"
        ) from error
    holding = {finding.rule.name: finding for finding in guards.holding(explained=True)}
    all_findings = [
        replace(finding, times=holding[finding.rule.name].times)
        if finding.rule.name in holding
        else replace(finding, is_over=True)
        for finding in begun
    ]
    examples = _examples(folder, all_findings, damaged, notes)
    return Diagnosis(all_findings, examples, last, (folder / _SUMMARY).is_file(), damaged, notes)


def _is_number(value: object) -> bool:
    """Whether a value is a number that a float can hold. JSON has integers of any length."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= sys.float_info.max)


def _lines(path: Path, damaged: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Yield the lines that are objects with a step, and count the others."""
    with os.fdopen(open_regular(path), "rb") as file:
        while line := file.readline(_LONGEST):
            try:
                row = json.loads(line) if line.endswith(b"\n") else None
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict) and type(row.get("step")) is int:
                yield row
            elif line.strip():
                damaged[path.name] = damaged.get(path.name, 0) + 1


def read_setting(folder: Path, notes: list[str]) -> Setting:
    """Return what the newest record of a run's configuration says.

    Args:
        folder: folder of the run.
        notes: list that is told if there is no record, or if it cannot be read.
    """
    path = newest_record(folder) / "config.yaml"
    try:
        return Setting.of(read_yaml(path))
    except FileNotFoundError:
        state = "is missing"
    except KeyError as error:
        state = f"cannot be read ({error.args[0]} is missing)"
    except yaml.MarkedYAMLError as error:
        # Its text quotes the line, which may have a key in it.
        line = "" if error.problem_mark is None else f" in line {error.problem_mark.line + 1}"
        state = f"cannot be read ({error.problem or 'no YAML'}{line})"
    except (OSError, OverflowError, TypeError, *DAMAGED) as error:
        state = f"cannot be read ({' '.join(str(error).split()):.200})"
    notes.append(f"{path.relative_to(folder)} {state}, so thresholds are the usual ones")
    return Setting()


def _examples(
    folder: Path, all_findings: list[Finding], damaged: dict[str, int], notes: list[str]
) -> dict[str, Example]:
    """Return for each finding a response of the newest step that it was seen in, with an error if one has it.

    A round is in the file under the first step that trains on it.
    """
    examples: dict[str, Example] = {}
    for name, unit in ((ROLLOUTS, False), (EVALUATIONS, True)):
        shown = [finding for finding in all_findings if (finding.rule.unit == "evaluation") == unit]
        if not shown or not (folder / name).exists():
            continue
        try:
            for row in _lines(folder / name, damaged):
                for finding in shown:
                    _take(finding, row, name, examples)
        except OSError as error:
            notes.append(f"{name} cannot be read ({error.strerror}), so no response of it is shown")
    return examples


def _take(finding: Finding, row: Mapping[str, Any], file: str, examples: dict[str, Example]) -> None:
    best, step = examples.get(finding.rule.name), row["step"]
    errors = row.get("errors")
    error = str(next(iter(errors.values()))) if isinstance(errors, dict) and errors else ""
    if step > finding.step or (best is not None and step == best.step and (best.error or not error)):
        return
    value = row.get("reward", row.get("grade"))
    reward = float(value) if value is not None and _is_number(value) else None
    examples[finding.rule.name] = Example(file, step, str(row.get("response", "")), reward, error)
