"""Writes the JSON lines of a run: append-only files that survive a kill at any moment.

The rows of a step reach the operating system in one write. A killed process therefore leaves complete lines
and at most one partial line at the end. A resumed run removes the partial line and the lines of all steps
that it will repeat. NaN and infinities are written as ``null``, because JSON cannot represent them; every
JSON parser can then read the files. This module accepts any JSON value and does not interpret it.
"""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torchrl_grpo.errors import CheckpointError, ConfigError, RunFolderLost
from torchrl_grpo.runtime.disk_full import is_disk_full_error
from torchrl_grpo.runtime.files.shared_files import open_regular

METRICS = "metrics.jsonl"
ROLLOUTS = "rollouts.jsonl"
DISCARDED = "discarded.jsonl"
EVALUATIONS = "evaluations.jsonl"
_STEP = re.compile(rb'\{"step": (-?\d+)[,}]')


def jsonable(value: Any) -> Any:
    """Convert a value to plain JSON types: arrays to lists or numbers, NaN and infinities to ``None``.

    Raises:
        TypeError: JSON cannot represent the value.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): jsonable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(entry) for entry in value]
    if hasattr(value, "tolist"):  # numpy and torch, neither of which is imported
        return jsonable(value.tolist())
    raise TypeError(f"{value!r} of type {type(value).__name__} cannot be written as JSON.")


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read all complete lines of a file that this module wrote, and ignore a partial last line.

    Args:
        path: path of the file, which another process may still be writing.

    Returns:
        One dictionary per line, in the order of the file.

    Raises:
        OSError: the file cannot be read.
        json.JSONDecodeError: a complete line is not valid JSON.
    """
    whole, _, _torn = Path(path).read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in whole.split(b"\n") if line]


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


class _Lines:
    """An append-only file of JSON objects, each of which starts with its step."""

    def __init__(self, path: Path, resume_step: int | None, are_read: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.last_step: int | None = None
        # Whether the run reads the lines again.
        self._are_read = are_read
        # Number of lines of each step that a resumed run keeps.
        self.kept: Counter[int] = Counter()
        self._existed = path.exists()
        if resume_step is not None:
            self._cut(resume_step)
        elif self._existed and path.stat().st_size:
            raise ConfigError(
                f"{path} already holds a run; write resume=auto to continue it, or give the new run a "
                "folder of its own with hydra.run.dir=FOLDER"
            )
        self._file: int | None = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def _cut(self, resume_step: int) -> None:
        """Truncate the file before the first step after ``resume_step``, or before a partial last line."""
        if not self._existed:
            return
        keep, unread = 0, 0
        with os.fdopen(open_regular(self.path), "rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                match = _STEP.match(line)
                if match is None and not self._are_read:
                    # It stays, between lines of steps that stay. Readers leave it out.
                    unread += len(line)
                    continue
                if match is None:
                    raise CheckpointError(
                        f"{self.path}: line {number} does not begin with its step: {line[:60]!r}; "
                        "repair or remove the line, then resume again."
                    )
                if int(match[1]) > resume_step:
                    break
                if self._are_read and not _is_object(line):
                    raise CheckpointError(
                        f"{self.path}: line {number} is damaged: {line[:60]!r} is not JSON of one step; "
                        "repair or remove the line, then resume again."
                    )
                self.last_step = int(match[1])
                self.kept[self.last_step] += 1
                keep += unread + len(line)
                unread = 0
        os.truncate(self.path, keep)

    def missing(self, expected: Iterable[int], count: int) -> str | None:
        """Describe the steps that have fewer than ``count`` lines after a resumption; None without one."""
        steps = [step for step in expected if self.kept[step] < count]
        if not steps:
            return None
        span = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps ({steps[0]} to {steps[-1]})"
        how = "was cut or changed" if self._existed else "is missing"
        return f"warning: {self.path} {how}: it lacks lines of {span}, and the run goes on without them"

    def check(self) -> None:
        """Make sure that what is written is found.

        Raises:
            RunFolderLost: the file was deleted or moved.
        """
        if not self.path.exists():
            raise RunFolderLost(f"{self.path} was deleted or moved while the run wrote to it")

    def append(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append the rows in one write, each with its step first."""
        if self._file is None:
            raise ValueError(f"{self.path} is closed.")
        block = "".join(
            json.dumps(jsonable({"step": int(step), **row}), allow_nan=False) + "\n" for row in rows
        ).encode("ascii")
        left, size = memoryview(block), os.fstat(self._file).st_size
        try:
            while left:  # os.write() writes the whole block, unless a signal interrupts it
                left = left[os.write(self._file, left) :]
        except OSError as error:
            # The next line begins where this one began.
            os.ftruncate(self._file, size)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        if block:
            self.last_step = int(step)

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class MetricsWriter:
    """Writes ``metrics.jsonl``: one line per optimizer step, in order, each with ``step`` first.

    Args:
        run_dir: folder of the run, created if missing.
        resume_step: last step to keep; later lines are removed. None starts a new file. -1 removes all lines,
            for a run that starts again because it had no checkpoint.

    Raises:
        ConfigError: a new run would write to the file of another run.
        CheckpointError: the file to continue has a damaged line before its end.
    """

    def __init__(self, run_dir: str | os.PathLike[str], resume_step: int | None = None) -> None:
        self._lines = _Lines(Path(run_dir) / METRICS, resume_step, are_read=True)
        self.path = self._lines.path

    @property
    def last_step(self) -> int | None:
        """Step of the last line; None if there is no line."""
        return self._lines.last_step

    def missing(self, expected: Iterable[int]) -> str | None:
        """Describe which of the expected steps have no line after a resumption; None if all have one."""
        return self._lines.missing(expected, 1)

    def check(self) -> None:
        """Make sure that what is written is found.

        Raises:
            RunFolderLost: the file was deleted or moved.
        """
        self._lines.check()

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append the line of one step.

        Args:
            step: number of optimizer steps taken. Step 0 is the evaluation before training.
            metrics: numbers by name. The key ``step`` is ignored.

        Raises:
            ValueError: the step is not later than the last one, or the writer is closed.
        """
        if self.last_step is not None and step <= self.last_step:
            raise ValueError(f"step {step} comes after step {self.last_step} in {self.path}.")
        self._lines.append(step, [{name: value for name, value in metrics.items() if name != "step"}])

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


class RolloutWriter:
    """Writes ``rollouts.jsonl``: one line per response, with its rewards.

    Args:
        run_dir: folder of the run, created if missing.
        resume_step: last step to keep, see :class:`MetricsWriter`.

    Raises:
        ConfigError: a new run would write to the file of another run.
        CheckpointError: the file to continue has a damaged line before its end.
    """

    _NAME = ROLLOUTS
    _FIRST: tuple[str, ...] = ("prompt", "response", "reward", "rewards", "advantage", "policy_version")

    def __init__(self, run_dir: str | os.PathLike[str], resume_step: int | None = None) -> None:
        self._lines = _Lines(Path(run_dir) / self._NAME, resume_step)
        self.path = self._lines.path

    def check(self) -> None:
        self._lines.check()

    def missing(self, expected: Iterable[int]) -> str | None:
        """Describe which of the expected steps lack lines after a resumption; None if none does.

        Every round has the same number of responses.
        """
        return self._lines.missing(expected, max(self._lines.kept.values(), default=1))

    def write(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append the responses of a round, under the first step that trains on it.

        Args:
            step: number of the optimizer step.
            rows: responses. A full disk loses them with a warning, and ends no training, because only people
                read them. Each has ``prompt``, ``response``, ``reward`` (the weighted total), ``rewards``
                (rewards and their components by name, unweighted), ``advantage`` and ``policy_version``.
                ``errors`` (optional) maps the name of a reward to its error. Other keys are written
                unchanged.

        Raises:
            KeyError: a row lacks one of the six required keys.
            ValueError: the writer is closed.
        """
        try:
            self._lines.append(step, [self._order(row) for row in rows])
        except OSError as error:
            if not is_disk_full_error(error):
                raise
            warnings.warn(
                f"{self.path} could not grow ({error.strerror}); the run goes on without these responses, so "
                "make room there",
                stacklevel=2,
            )

    def _order(self, row: Mapping[str, Any]) -> dict[str, Any]:
        ordered = {name: row[name] for name in self._FIRST}
        ordered.update((name, row[name]) for name in row if name not in (*self._FIRST, "step", "errors"))
        if row.get("errors"):
            ordered["errors"] = row["errors"]
        return ordered

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


class EvaluationWriter(RolloutWriter):
    """Writes ``evaluations.jsonl``: one line per held-out response, with its rewards.

    :class:`RolloutWriter` has the arguments and errors. A row has ``id``, ``prompt``, ``response`` and
    ``rewards``.
    """

    _NAME = EVALUATIONS
    _FIRST = ("id", "prompt", "response", "rewards")


class DiscardedWriter(RolloutWriter):
    """Writes ``discarded.jsonl``: one line per response that no step trains on.

    :class:`RolloutWriter` has the arguments and errors. A row has no ``advantage``, and ``discarded`` says
    why.
    """

    _NAME = DISCARDED
    _FIRST = ("prompt", "response", "reward", "rewards", "policy_version", "discarded")
