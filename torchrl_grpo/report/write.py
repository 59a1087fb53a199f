"""Writes ``report.html`` and ``report.png`` of a run. A failure is a message, and no error of the run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from torchrl_grpo.config.schema import Config
from torchrl_grpo.observe import report
from torchrl_grpo.observe.loggers import Loggers
from torchrl_grpo.observe.metrics import METRICS
from torchrl_grpo.observe.report import PAGE
from torchrl_grpo.report import about
from torchrl_grpo.report.page_file import render
from torchrl_grpo.report.reader import RunReader
from torchrl_grpo.runtime.files.shared_files import replace


def write(reader: RunReader, path: Path | None = None) -> Path:
    """Read what is new in a run's files, and write its report.

    Args:
        reader: reader of the run.
        path: file to write; None for ``report.html`` in the folder of the run.

    Raises:
        OSError: a file cannot be read, or the report cannot be written.
    """
    reader.update()
    path = path or reader.run_dir / PAGE
    replace(path, render([reader.contents()]))
    return path


class ReportWriter:
    """Writes the report of a run in progress, again and again.

    Args:
        run_dir: folder of the run.
        warn: function that shows a message. It is called for the first failure of each kind.
    """

    _NOT_WRITTEN = (
        "warning: {run}/report.html could not be written ({reason}); the run does not need it, and "
        "grpo-report {run} writes it later"
    )
    _NOT_UPLOADED = (
        "warning: {run}/report.html could not be uploaded ({reason}); the run does not need it, and the file "
        "stays in its folder"
    )
    _NOT_DRAWN = (
        "warning: {run}/report.png could not be drawn ({reason}); the run does not need it, and report.html "
        "has its curves"
    )

    def __init__(self, run_dir: Path, warn: Callable[[str], object]) -> None:
        self._reader = RunReader(run_dir)
        self._warn = warn
        self._told: set[str] = set()

    def record(self, cfg: Config, plan: str) -> None:
        """Write what only the run itself knows, see :func:`torchrl_grpo.report.about.record`."""
        self._try(self._NOT_WRITTEN, lambda: about.record(self._reader.run_dir, cfg, plan))

    def write(self) -> None:
        """Write the report of what the files say now."""
        self._try(self._NOT_WRITTEN, lambda: write(self._reader))

    def close(self, loggers: Loggers | None) -> None:
        """Write the report of a run that ends or is stopped, and hand it to any loggers that keep files."""
        metrics = self._reader.run_dir / METRICS
        # Without a measurement there is nothing to show, and the folder may have been deleted.
        if os.path.exists(metrics) and os.path.getsize(metrics):
            self.write()
            if loggers is not None:
                self.upload(loggers)

    def upload(self, loggers: Loggers) -> None:
        """Hand the newest report to the loggers that keep files."""
        self._try(self._NOT_UPLOADED, lambda: loggers.log_report(self._reader.run_dir / PAGE))

    def draw(self, grader: str) -> None:
        """Draw ``report.png``, see :func:`torchrl_grpo.observe.report.plot`."""
        self._try(self._NOT_DRAWN, lambda: report.plot(self._reader.run_dir, grader))

    def _try(self, failure: str, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001  # a defect of the report must not cost the run its training
            if failure not in self._told:
                self._told.add(failure)
                reason = f"{type(error).__name__}: {error}"
                self._warn(failure.format(run=self._reader.run_dir, reason=reason))
