"""A run writes its report at each evaluation and at its end, and goes on where it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_files import payload
from tiny_runs import Runner, config, train

from torchrl_grpo.report import write
from torchrl_grpo.report.reader import RunReader

__all__ = ["config", "train"]


def test_a_run_writes_its_report_and_goes_on_where_it_cannot(
    train: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_report, steps = write.write, []

    def fail_at_first(reader: RunReader) -> Path:
        steps.append(len((reader.run_dir / "metrics.jsonl").read_text().splitlines()) - 1)
        if len(steps) == 1:
            raise OSError(28, "No space left on device", "report.html")
        return write_report(reader)

    monkeypatch.setattr(write, "write", fail_at_first)
    lines = train("run")
    # Evaluations at steps 0, 2 and 4, and the end.
    assert steps == [0, 2, 4, 4] and len(lines) == 5
    output = capsys.readouterr()
    assert output.err.count("No space left on device") == 1 and "  report.html " in output.out
    (run,) = payload((tmp_path / "run/report.html").read_text())["runs"]
    assert run["summary"]["steps"] == 4 and run["about"]["versions"]["torch"]
    assert "colocated" in run["about"]["plan"] and run["about"]["right"]["threshold"] == 1.0
