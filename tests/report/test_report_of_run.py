"""A run writes its report at each evaluation and at its end, and goes on where it cannot."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from run_files import inflated, payload
from tensordict import TensorDictBase
from tiny_runs import Runner, config, train

from torchrl_grpo.observe import report
from torchrl_grpo.observe.loggers import Loggers
from torchrl_grpo.report import write
from torchrl_grpo.report.reader import RunReader
from torchrl_grpo.runtime.interrupts import Terminated
from torchrl_grpo.tools.verify_resume import read
from torchrl_grpo.training.session import Session

__all__ = ["config", "train"]

pytestmark = pytest.mark.slow


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
    # Evaluations at steps 0, 2 and 4, before loggers close, and after summary.json.
    assert steps == [0, 2, 4, 4, 4] and len(lines) == 5
    output = capsys.readouterr()
    assert output.err.count("No space left on device") == 1 and "  report.html " in output.out
    (run,) = payload((tmp_path / "run/report.html").read_text())["runs"]
    assert run["summary"]["steps"] == 4 and run["about"]["versions"]["torch"]
    assert "colocated" in run["about"]["plan"] and run["about"]["right"]["threshold"] == 1.0


def test_a_run_without_evaluations_or_a_picture_has_its_summary_and_hands_its_report_to_the_loggers(
    train: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = []
    monkeypatch.setattr(Loggers, "log_report", lambda loggers, path: pages.append(payload(path.read_text())))
    monkeypatch.setattr(report, "plot", fail)
    train("run", eval__num_problems=0, train__total_dialog_turns=32)
    (page,) = pages
    assert steps_of(page) == [1, 2]
    assert json.loads((tmp_path / "run/summary.json").read_text())["steps"] == 2
    warning = f"warning: {tmp_path}/run/report.png could not be drawn (OSError: [Errno 28] full)"
    assert warning in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ending", "is_full"), [(KeyboardInterrupt, False), (RuntimeError, True), (Terminated, False)]
)
def test_a_run_that_is_stopped_has_a_report_and_shows_its_own_error(
    train: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: type[BaseException], is_full: bool
) -> None:
    honest = Session.train_on

    def end(session: Session, batch: TensorDictBase) -> dict[str, float]:
        if session.counters.step == 1:
            if is_full:
                monkeypatch.setattr(write, "write", fail)
            raise ending("the real one")
        return honest(session, batch)

    monkeypatch.setattr(Session, "train_on", end)
    uploads: list[Path] = []
    monkeypatch.setattr(Loggers, "log_report", lambda loggers, path: uploads.append(path))
    with pytest.raises(ending, match="the real one"):
        train("run", eval__num_problems=0)
    page = tmp_path / "run/report.html"
    # Somebody who terminates a run waits for seconds only.
    assert page.exists() == (ending is KeyboardInterrupt) and not uploads
    if page.exists():
        shown = payload(page.read_text())
        assert steps_of(shown) == [1]
        (run,) = shown["runs"]
        assert {*array("i", inflated(run["rollouts"]["step"]["deflate"]))} == {1, 2}


def fail(*args: object) -> None:
    raise OSError(28, "full")


def steps_of(page: Any) -> list[int]:
    (run,) = page["runs"]
    return list(array("i", inflated(run["steps"]["deflate"])))


def test_tokens_of_the_first_responses_are_recorded_and_change_nothing(train: Runner, tmp_path: Path) -> None:
    plain = train("plain", train__total_dialog_turns=32)
    assert train("detailed", logging__token_details=5) == plain
    rows = [read(tmp_path / name / "rollouts.jsonl") for name in ("plain", "detailed")]
    assert [{k: v for k, v in row.items() if k != "tokens"} for row in rows[1]] == rows[0]
    steps = Counter(row["step"] for row in rows[1] if "tokens" in row)
    assert steps == {1: 5, 2: 5}
    for row in rows[1][:5]:
        tokens = row["tokens"]
        assert len(tokens["text"]) == len(tokens["engine"]) == len(tokens["trainer"]) == row["length"]
        assert "".join(tokens["text"]).startswith(row["response"][:3])
        assert tokens["trainer"] == pytest.approx(tokens["engine"], abs=0.1)
