"""``metrics.jsonl`` and ``rollouts.jsonl``: append-only JSON lines that survive a kill at any moment.

Every line is handed to the operating system in one write, so a killed process leaves whole lines and
at most one torn one at the end; a resumed run cuts that one off, and every line of a step that it is
going to run again. NaN and infinities are written as ``null``: JSON has no word for them, and every
reader of JSON can then read the files. Left out: interpretation; any JSON value goes in.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torchrl_grpo.errors import CheckpointError, ConfigError

METRICS = "metrics.jsonl"
ROLLOUTS = "rollouts.jsonl"
_STEP = re.compile(rb'\{"step": (-?\d+)[,}]')


def jsonable(value: Any) -> Any:
    """The value as plain JSON types: array scalars unwrapped, NaN and infinities as ``None``.

    Raises:
        TypeError: the value has no place in JSON.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): jsonable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(entry) for entry in value]
    if hasattr(value, "tolist"):  # numpy and torch, without importing either
        return jsonable(value.tolist())
    raise TypeError(f"{value!r} of type {type(value).__name__} cannot be written as JSON.")


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All whole lines of a file of this module; a torn last line is left out.

    Args:
        path: the file, which another process may still be writing.

    Returns:
        One dictionary per line, in file order.

    Raises:
        OSError: the file cannot be read.
        json.JSONDecodeError: a line that is not the last is no JSON.
    """
    whole, _, _torn = Path(path).read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in whole.split(b"\n") if line]


class _Lines:
    """An append-only file of JSON objects that begin with their step."""

    def __init__(self, path: Path, resume_step: int | None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.last_step: int | None = None
        if resume_step is not None:
            self._cut(resume_step)
        elif path.exists() and path.stat().st_size:
            raise ConfigError(
                f"{path} already holds a run. Write resume=auto to continue it, or give the new run a "
                "folder of its own with hydra.run.dir=FOLDER."
            )
        self._file: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def _cut(self, resume_step: int) -> None:
        """Cuts the file where the first step after ``resume_step``, or a torn last line, begins."""
        if not self.path.exists():
            return
        keep = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                match = _STEP.match(line)
                if match is None:
                    raise CheckpointError(
                        f"{self.path}: line {number} does not begin with its step: {line[:60]!r}; "
                        "repair or remove the line, then resume again."
                    )
                if int(match[1]) > resume_step:
                    break
                self.last_step = int(match[1])
                keep += len(line)
        os.truncate(self.path, keep)

    def append(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes the rows as one block, each with its step in front."""
        if self._file is None:
            raise ValueError(f"{self.path} is closed.")
        block = "".join(
            json.dumps(jsonable({"step": int(step), **row}), allow_nan=False) + "\n" for row in rows
        ).encode("ascii")
        left = memoryview(block)
        try:
            while left:  # a regular file takes all of it at once, unless a signal comes between
                left = left[os.write(self._file, left) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        if block:
            self.last_step = int(step)

    def close(self) -> None:
        """Closes the file; closing twice is harmless."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class MetricsWriter:
    """``metrics.jsonl``: one line per optimizer step, in order, ``step`` first.

    Args:
        run_dir: the run's folder, made if missing.
        resume_step: ``None`` starts a new file; a number keeps the lines up to that step and drops the
            rest; -1 drops all of them, for a run that begins again because it had no checkpoint yet.

    Raises:
        ConfigError: a new run would write into the file of another.
        CheckpointError: the file to continue is damaged before its last line.
    """

    def __init__(self, run_dir: str | os.PathLike[str], resume_step: int | None = None) -> None:
        self._lines = _Lines(Path(run_dir) / METRICS, resume_step)
        self.path = self._lines.path

    @property
    def last_step(self) -> int | None:
        """Step of the last line, or ``None`` when there is none."""
        return self._lines.last_step

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends the line of one step.

        Args:
            step: optimizer steps done so far; 0 is the evaluation before training.
            metrics: names to numbers; a ``step`` in it is ignored.

        Raises:
            ValueError: the step is not later than the last one, or the writer is closed.
        """
        if self.last_step is not None and step <= self.last_step:
            raise ValueError(f"step {step} comes after step {self.last_step} in {self.path}.")
        self._lines.append(step, [{name: value for name, value in metrics.items() if name != "step"}])

    def close(self) -> None:
        """Closes the file."""
        self._lines.close()


class RolloutWriter:
    """``rollouts.jsonl``: every response with its rewards, one line each.

    Args:
        run_dir: the run's folder, made if missing.
        resume_step: as for :class:`MetricsWriter`.

    Raises:
        ConfigError: a new run would write into the file of another.
        CheckpointError: the file to continue is damaged before its last line.
    """

    _FIRST = ("prompt", "response", "reward", "rewards", "advantage", "policy_version")

    def __init__(self, run_dir: str | os.PathLike[str], resume_step: int | None = None) -> None:
        self._lines = _Lines(Path(run_dir) / ROLLOUTS, resume_step)
        self.path = self._lines.path

    def write(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Appends the responses that a step was trained on.

        Args:
            step: the optimizer step.
            rows: each with ``prompt``, ``response``, ``reward`` (the weighted total), ``rewards`` (its
                parts by name), ``advantage`` and ``policy_version``; ``errors`` (reward name to
                message) is written when there are any; further keys follow as they are.

        Raises:
            KeyError: a row lacks one of the six.
            ValueError: the writer is closed.
        """
        self._lines.append(step, [self._order(row) for row in rows])

    def _order(self, row: Mapping[str, Any]) -> dict[str, Any]:
        ordered = {name: row[name] for name in self._FIRST}
        ordered.update((name, row[name]) for name in row if name not in (*self._FIRST, "step", "errors"))
        if row.get("errors"):
            ordered["errors"] = row["errors"]
        return ordered

    def close(self) -> None:
        """Closes the file."""
        self._lines.close()
