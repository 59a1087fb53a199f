"""``grpo-doctor``: what it prints, and with which code it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torchrl_grpo.cli.doctor import main


def _write(folder: Path, error_share: float, response: str = "42") -> Path:
    line: dict[str, Any] = {
        "reward/constant_groups": 0.5,
        "reward/mean": 0.1,
        "reward/error_share": error_share,
    }
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, **line}) + "\n{\n")
    rollout = {"step": 1, "response": response, "reward": 0.0, "errors": {"mine": f"bad {response}"}}
    (folder / "rollouts.jsonl").write_text(json.dumps(rollout) + "\n")
    return folder


def _run(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_run_without_a_finding_ends_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(str(_write(tmp_path, 0.0))) == 0
    shown = capsys.readouterr().out
    assert "0 findings; last step 1" in shown and "metrics.jsonl: 1 damaged lines were skipped" in shown


def test_a_finding_has_evidence_step_fix_and_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(str(_write(tmp_path, 1.0))) == 1
    shown = capsys.readouterr().out
    for part in (
        "reward_fails: 100% of the calls of a reward failed",
        "since step 1",
        "reward.functions",
        "source  a reward that fails on half",
        "'42'",
    ):
        assert part in shown
    assert _run(str(tmp_path), "--json") == 1
    report = json.loads(capsys.readouterr().out)
    (finding,) = report["findings"]
    assert (
        finding["rule"] == "reward_fails" and finding["step"] == 1 and "reward.functions" in finding["keys"]
    )
    assert finding["example"]["error"] == "bad 42" and report["damaged_lines"] == {"metrics.jsonl": 1}


def test_nothing_that_a_terminal_obeys_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202e text\n"
    for options in ([], ["--json"]):
        assert _run(str(_write(tmp_path, 1.0, hostile)), *options) == 1
        shown = capsys.readouterr().out
        assert "owned" in shown and not {"\x1b", "\x07", "\r", "\x9b", "\u202e"} & set(shown)


def test_a_folder_without_a_run_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(str(tmp_path / "none")) == 2
    assert "no metrics of a run" in capsys.readouterr().err
