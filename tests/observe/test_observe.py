"""What a run leaves behind: JSON lines that survive a kill, loggers, progress, report, statistics."""

from __future__ import annotations

import contextlib
import errno
import importlib.machinery
import io
import json
import math
import os
import re
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from matplotlib.axes import Axes
from PIL import Image

from torchrl_grpo.config import Config
from torchrl_grpo.errors import CheckpointError, ConfigError, RunFolderLost
from torchrl_grpo.observe import report, wandb_login
from torchrl_grpo.observe.loggers import Loggers, build
from torchrl_grpo.observe.metrics import EvaluationWriter, MetricsWriter, RolloutWriter, read_jsonl
from torchrl_grpo.observe.pictures import write_pictures
from torchrl_grpo.observe.progress import Progress
from torchrl_grpo.observe.report import SUMMARY, of_ended_run, plot, summary
from torchrl_grpo.observe.stats import cuda_in_use, pass_at_k, peak_cuda_gib, peak_memory_gib, wilson

# --- statistics ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        # Newcombe 1998 (Statistics in Medicine 17), table I, method 3: four places printed
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_agrees_with_the_literature(successes: int, n: int, low: float, high: float) -> None:
    assert wilson(successes, n) == pytest.approx((low, high), abs=5e-5)


def test_wilson_solves_its_own_equation() -> None:
    """Both bounds p are where (phat - p)^2 = z^2 p (1-p) / n."""
    for n in (1, 7, 200):
        for successes in (0.5, n / 3, n - 0.25):
            for bound in wilson(successes, n):
                expected = 1.959963984540054**2 * bound * (1 - bound) / n
                assert (successes / n - bound) ** 2 == pytest.approx(expected, rel=1e-9)


def test_wilson_at_the_ends() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(0, 5)[0] == 0.0
    assert wilson(5, 5)[1] == 1.0
    for bad in ((-1, 5), (6, 5), (0, -1)):
        with pytest.raises(ValueError, match="must lie within"):
            wilson(*bad)


def test_pass_at_k_is_the_counting_formula() -> None:
    for n in range(1, 9):
        for correct in range(n + 1):
            for k in range(1, n + 1):
                exact = 1 - math.comb(n - correct, k) / math.comb(n, k)
                assert pass_at_k(n, correct, k) == pytest.approx(exact, abs=1e-12)
    assert pass_at_k(10_000, 1, 1) == pytest.approx(1e-4)
    for bad in ((3, 4, 1), (3, 1, 4), (3, 1, 0), (3, -1, 1)):
        with pytest.raises(ValueError, match="must lie within"):
            pass_at_k(*bad)


@pytest.mark.slow
def test_peak_memory_sees_a_large_allocation() -> None:
    before = peak_memory_gib()
    block = bytearray(os.urandom(2**20)) * 300
    after = peak_memory_gib()
    assert len(block) == 300 * 2**20
    assert 0.0 < before <= after < 1000
    code = (
        "from torchrl_grpo.observe.stats import peak_memory_gib, peak_cuda_gib\n"
        "small = peak_memory_gib(); block = b'x' * (256 * 2**20)\n"
        "print(small, peak_memory_gib() - small, peak_cuda_gib())"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    small, grown, cuda = map(float, ran.stdout.split())
    assert small < 0.2, "the parent's peak must not be taken for the child's"
    assert 0.24 < grown < 0.3
    assert cuda == 0.0
    assert peak_cuda_gib() >= 0.0


# --- JSON lines ------------------------------------------------------------------------------------


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_memory_of_a_gpu_is_what_everybody_has_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * 2**30, 80 * 2**30))
    assert cuda_in_use("memory/train_cuda_gib", torch.device("cuda:1")) == {"memory/train_cuda_gib": 77.0}
    assert cuda_in_use("memory/train_cuda_gib", torch.device("cpu")) == {}


def test_metrics_are_one_line_a_step_with_the_step_first(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "run")
    writer.write(0, {"eval/accuracy": 0.25})
    writer.write(1, {"reward/mean": 0.5, "step": 77, "nan": math.nan, "inf": -math.inf, "n": 3, "flag": True})
    assert writer.path.read_text() == (
        '{"step": 0, "eval/accuracy": 0.25}\n'
        '{"step": 1, "reward/mean": 0.5, "nan": null, "inf": null, "n": 3, "flag": true}\n'
    ), "both lines are in the file though it is still open"
    with pytest.raises(ValueError, match="step 1 comes after step 1"):
        writer.write(1, {})
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.write(2, {})


def test_metrics_take_array_scalars_and_refuse_what_is_no_json(tmp_path: Path) -> None:
    import numpy as np

    writer = MetricsWriter(tmp_path)
    writer.write(1, {"a": np.float32(0.5), "b": np.array([1.0, np.nan])})
    with pytest.raises(TypeError, match="object"):
        writer.write(2, {"a": object()})
    assert lines(writer.path) == [{"step": 1, "a": 0.5, "b": [1.0, None]}]


def test_a_new_run_does_not_write_into_another(tmp_path: Path) -> None:
    MetricsWriter(tmp_path).write(1, {"a": 1})
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"resume=auto.*hydra.run.dir"):
        MetricsWriter(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("resume_step", "kept"), [(-1, []), (0, [0]), (2, [0, 1, 2]), (4, [0, 1, 2, 3, 4]), (9, 5)]
)
@pytest.mark.parametrize("torn", [b"", b'{"step": 5, "a": 0.', b'{"step": 5, "a": 1}', b"{"])
def test_resume_cuts_later_steps_and_a_torn_line(
    tmp_path: Path, resume_step: int, kept: Any, torn: bytes
) -> None:
    writer = MetricsWriter(tmp_path)
    for step in range(5):
        writer.write(step, {"a": step})
    writer.close()
    with writer.path.open("ab") as file:
        file.write(torn)
    resumed = MetricsWriter(tmp_path, resume_step=resume_step)
    kept = list(range(kept)) if isinstance(kept, int) else kept
    assert [line["step"] for line in lines(resumed.path)] == kept
    assert resumed.last_step == (kept[-1] if kept else None)
    resumed.write(resume_step + 1, {"a": -1})
    assert lines(resumed.path)[-1] == {"step": resume_step + 1, "a": -1}


def test_resume_without_a_file_starts_one(tmp_path: Path) -> None:
    MetricsWriter(tmp_path, resume_step=3).write(4, {})
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [4]


def test_a_resumed_run_names_the_steps_that_its_files_lack(tmp_path: Path) -> None:
    metrics = MetricsWriter(tmp_path)
    rollouts = RolloutWriter(tmp_path)
    for step in range(7):
        metrics.write(step, {"x": 1})
    for step in (1, 3, 5):
        rollouts.write(step, [ROW] * 4)
    metrics.close()
    rollouts.close()

    def messages_at(step: int) -> list[str | None]:
        writers = MetricsWriter(tmp_path, step), RolloutWriter(tmp_path, step)
        messages = [writers[0].missing(range(step + 1)), writers[1].missing(range(1, step + 1, 2))]
        for writer in writers:
            writer.close()
        return messages

    assert messages_at(6) == [None, None]
    lines = metrics.path.read_bytes().splitlines(keepends=True)
    # The head of one file is lost, and the end of the other, in the middle of a line.
    metrics.path.write_bytes(b"".join(lines[2:]))
    rollouts.path.write_bytes(rollouts.path.read_bytes()[:-20])
    lacks, end = "was cut or changed: it lacks lines of", ", and the run goes on without them"
    assert messages_at(6) == [
        f"warning: {metrics.path} {lacks} 2 steps (0 to 1){end}",
        f"warning: {rollouts.path} {lacks} step 5{end}",
    ]
    for path in (metrics.path, rollouts.path):
        path.unlink()
    messages = messages_at(4)
    assert [str(message).partition(" lines of ")[2].partition(",")[0] for message in messages] == [
        "5 steps (0 to 4)",
        "2 steps (1 to 3)",
    ]
    assert all("jsonl is missing: it lacks" in str(message) for message in messages)


def test_what_is_written_is_looked_for(tmp_path: Path) -> None:
    for writer in (MetricsWriter(tmp_path), RolloutWriter(tmp_path), EvaluationWriter(tmp_path)):
        writer.check()
        writer.path.rename(tmp_path / "moved")
        with pytest.raises(
            RunFolderLost, match=f"{writer.path} was deleted or moved while the run wrote to it"
        ):
            writer.check()
        writer.close()


@pytest.mark.parametrize("step", [None, 3])
@pytest.mark.parametrize("writer", [MetricsWriter, RolloutWriter, EvaluationWriter])
def test_a_file_of_another_kind_does_not_block(tmp_path: Path, step: int | None, writer: Any) -> None:
    for name in ("metrics.jsonl", "rollouts.jsonl", "evaluations.jsonl"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(OSError, match="is not a regular file"):
        writer(tmp_path, step)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"garbage", "line 2 does not begin with its step: b'garbage"),
        (b'{"step": 2, "a": \x00\x00', 'line 2 is damaged: b\'{"step": 2,'),
        (b'{"step": 2} {"step": 3}', 'line 2 is damaged: b\'{"step": 2}'),
    ],
)
def test_resume_refuses_a_file_damaged_in_the_middle(tmp_path: Path, line: bytes, says: str) -> None:
    path = tmp_path / "metrics.jsonl"
    damaged = b'{"step": 1, "a": 1}\n' + line + b'\n{"step": 3}\n'
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=says):
        MetricsWriter(tmp_path, resume_step=3)
    assert path.read_bytes() == damaged
    # What is cut anyway may be damaged.
    if b"step" in line:
        MetricsWriter(tmp_path, resume_step=1).close()


def test_a_damaged_line_of_responses_ends_no_training(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(b'{"step": 1}\ngarbage\n{"step": 2, "a": \x00\n{"step": 3}\nmore\n{"step": 4}\n')
    with contextlib.closing(RolloutWriter(tmp_path, resume_step=3)) as writer:
        # What is damaged after the last step that stays goes with the steps that are repeated.
        assert path.read_bytes() == b'{"step": 1}\ngarbage\n{"step": 2, "a": \x00\n{"step": 3}\n'
        writer.write(4, [ROW])
    assert [json.loads(path.read_bytes().splitlines()[row])["step"] for row in (0, 3, 4)] == [1, 3, 4]


def test_a_full_disk_loses_responses_with_a_warning_and_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, room = os.write, [10]

    def write(file: int, block: bytes | memoryview) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real(file, block[: room[0]])
        room[0] = 0
        return written

    with contextlib.closing(RolloutWriter(tmp_path)) as writer:
        writer.write(1, [ROW])
        monkeypatch.setattr(os, "write", write)
        with pytest.warns(UserWarning, match=r"rollouts\.jsonl could not grow \(No space left on device\)"):
            writer.write(2, [ROW])
        monkeypatch.undo()
        writer.write(3, [ROW])
    assert [line["step"] for line in lines(tmp_path / "rollouts.jsonl")] == [1, 3]


def test_a_full_disk_loses_pictures_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, data: bytes) -> int:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(path))

    with monkeypatch.context() as patch, pytest.warns(UserWarning, match=r"pictures could not grow"):
        patch.setattr(Path, "write_bytes", fail)
        write_pictures(tmp_path, [{"a.png": b"a"}])
    assert not [*(tmp_path / "pictures").iterdir()]


def test_reading_leaves_a_torn_line_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"ste')
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}]


def test_a_killed_writer_leaves_whole_lines(tmp_path: Path) -> None:
    """Killed without a chance to clean up, everything written before is there."""
    code = (
        "import os, signal, sys\nfrom torchrl_grpo.observe.metrics import MetricsWriter\n"
        "w = MetricsWriter(sys.argv[1])\n"
        "for i in range(100): w.write(i, {'x': i * 0.5})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert ran.returncode == -9
    assert [line["x"] for line in lines(tmp_path / "metrics.jsonl")] == [i * 0.5 for i in range(100)]


ROW = {
    "prompt": "p",
    "response": "two\nlines − \ud800 \u2028",
    "reward": 1.5,
    "rewards": {"gsm8k": 1.0, "format": math.nan},
    "advantage": -0.5,
    "policy_version": 3,
}


def test_rollouts_are_written_with_their_parts_and_errors(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path)
    writer.write(4, [ROW | {"errors": {}}, {"example_id": "x/1", "errors": {"gsm8k": "boom"}} | ROW])
    first, second = lines(writer.path)
    assert list(first) == ["step", "prompt", "response", "reward", "rewards", "advantage", "policy_version"]
    assert first["response"] == ROW["response"] and first["rewards"] == {"gsm8k": 1.0, "format": None}
    assert second["errors"] == {"gsm8k": "boom"} and second["example_id"] == "x/1"
    assert writer.path.read_bytes().count(b"\n") == 2
    with pytest.raises(KeyError, match="advantage"):
        writer.write(5, [{name: value for name, value in ROW.items() if name != "advantage"}])
    writer.close()


def test_resumed_rollouts_keep_whole_steps(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path)
    for step in (1, 2, 3):
        writer.write(step, [ROW] * 4)
    writer.close()
    os.truncate(writer.path, writer.path.stat().st_size - 20)
    resumed = RolloutWriter(tmp_path, resume_step=2)
    resumed.write(3, [ROW] * 4)
    assert [line["step"] for line in lines(resumed.path)] == [1] * 4 + [2] * 4 + [3] * 4


# --- progress --------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_plain_lines_where_there_is_no_terminal() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(100, stream=stream, clock=clock, start_step=10) as progress:
        progress.note("hello")
        clock.now = 60.0
        progress.update(20, reward=0.25, held_out=0.5, kl=0.00123, tokens_per_s=1234.5)
        clock.now = 120.0
        progress.update(30)
    assert stream.getvalue().splitlines() == [
        "hello",
        "step 20/100  reward 0.250  accuracy 0.500  kl 0.0012  1,234 tokens/s  08:00 left",
        "step 30/100  accuracy 0.500 at step 20  07:00 left",
    ]


def test_hours_and_an_unknown_time_left() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(1000, stream=stream, clock=clock) as progress:
        progress.update(0)
        clock.now = 10.0
        progress.update(1)
    assert stream.getvalue().splitlines() == ["step 0/1000", "step 1/1000  2:46:30 left"]


def test_a_bar_on_a_terminal_with_notes_above() -> None:
    stream = Terminal()
    with Progress(4, stream=stream) as progress:
        progress.update(2, reward=0.75)
        progress.note("evaluating")
    text = stream.getvalue()
    assert "2/4" in text and "reward 0.750" in text and "\r" in text
    assert "evaluating\n" in text
    assert text.endswith("\n")


def test_phases_are_plain_lines_where_there_is_no_terminal() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(4, stream=stream, clock=clock) as progress:
        progress.phase("loading the model")
        progress.note("hello")
        progress.phase("starting the engine")
        clock.now = 50.0
        progress.start()
        clock.now = 60.0
        progress.update(1)
    assert stream.getvalue().splitlines() == [
        "loading the model",
        "hello",
        "starting the engine",
        "step 1/4  00:30 left",
    ]


@pytest.mark.slow
def test_phases_on_a_terminal_count_seconds_and_come_before_the_bar() -> None:
    stream, clock = Terminal(), Clock()
    with Progress(4, stream=stream, clock=clock) as progress:
        progress.phase("loading the model")
        clock.now = 3.0
        progress.note("hello")
        assert "|" not in stream.getvalue()
        progress.phase("starting the engine")
        drawn = len(stream.getvalue())
        clock.now = 41.0
        deadline = time.monotonic() + 20
        while "(38 s)" not in stream.getvalue()[drawn:]:
            assert time.monotonic() < deadline, "the seconds of a phase are not counted while it lasts"
        progress.start()
        assert "0/4 |" in stream.getvalue()
    lines = [line.rpartition("\r")[2].replace("\x1b[K", "") for line in stream.getvalue().split("\n")]
    assert lines[:3] == ["hello", "loading the model (3 s)", "starting the engine (38 s)"]
    assert not any(t.name == "phase" for t in threading.enumerate())


@pytest.mark.parametrize("size", [(0, 24), (110, 0)])
def test_plain_lines_on_a_terminal_without_room_for_a_bar(size: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(stream, "fileno", lambda: 2)
    monkeypatch.setattr(os, "get_terminal_size", lambda number: os.terminal_size(size))
    with Progress(4, stream=stream) as progress:
        progress.update(0)
    assert stream.getvalue() == "step 0/4\n"


def test_progress_off_prints_notes_only() -> None:
    for stream in (io.StringIO(), Terminal()):
        with Progress(4, enabled=False, stream=stream) as progress:
            progress.phase("loading the model")
            progress.start()
            progress.update(1, reward=0.5)
            progress.note("only this")
        assert stream.getvalue() == "only this\n"


# --- report ----------------------------------------------------------------------------------------

FIGURES: dict[str, Any] = {
    "accuracy_before": 0.1,
    "accuracy_after": 0.75,
    "accuracy_ci95": (0.69, 0.8),
    "steps": 40,
    "seconds": 125.4321,
    "peak_memory_gib": 3.14159,
}


def test_summary_is_written_and_told(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "checkpoints").mkdir()
    stream = io.StringIO()
    path = summary(tmp_path, **FIGURES, extras={"reward_errors": 2, "gap": math.nan}, stream=stream)
    assert json.loads(path.read_text()) == {
        "accuracy_before": 0.1,
        "accuracy_after": 0.75,
        "accuracy_ci95": [0.69, 0.8],
        "steps": 40,
        "seconds": 125.432,
        "peak_memory_gib": 3.142,
        "reward_errors": 2,
        "gap": None,
    }
    text = stream.getvalue()
    for words in ("0.100 -> 0.750", "0.690 to 0.800", "40", "2 min 05 s", "3.14 GiB", str(tmp_path)):
        assert words in text
    for name in ("metrics.jsonl", "summary.json", "checkpoints"):
        assert name in text
    assert "report.png" not in text, "only what exists is named"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints", "metrics.jsonl", "summary.json"]


def test_summary_says_what_to_change_if_no_group_had_a_signal(tmp_path: Path) -> None:
    stream = io.StringIO()
    summary(tmp_path, **FIGURES, any_signal=False, stream=stream)
    warning = stream.getvalue().splitlines()[-1]
    for words in ("warning: in every group", "env.repeats", "reward.weights", "temperature", "easier"):
        assert words in warning
    summary(tmp_path, **FIGURES, stream=(quiet := io.StringIO()))
    summary(tmp_path, **FIGURES | {"steps": 0}, any_signal=False, stream=(none := io.StringIO()))
    assert "warning" not in quiet.getvalue() + none.getvalue()


def test_summary_without_evaluation_and_with_a_clash(tmp_path: Path) -> None:
    stream = io.StringIO()
    nothing = FIGURES | {"accuracy_before": None, "accuracy_after": None, "accuracy_ci95": None}
    path = summary(tmp_path, **nothing, stream=stream)
    assert json.loads(path.read_text())["accuracy_after"] is None
    assert "accuracy" not in stream.getvalue().replace("reward and accuracy", "")
    with pytest.raises(ValueError, match="hide steps"):
        summary(tmp_path, **FIGURES, extras={"steps": 1}, stream=stream)


def test_summary_names_what_grades_and_the_mean_of_a_reward(tmp_path: Path) -> None:
    nothing = FIGURES | {"accuracy_before": None, "accuracy_after": None, "accuracy_ci95": None}
    mean = {"primary_before": 0.25, "primary_after": 2.5, "primary_ci95": [2.0, 3.0], "grader": "brevity"}
    summary(tmp_path, **nothing, extras=mean, stream=(stream := io.StringIO()))
    output = stream.getvalue()
    assert "held-out reward    0.250 -> 2.500   (95 % interval 2.000 to 3.000)\n" in output
    assert "graded by          brevity\n" in output and "accuracy" not in output
    # A single problem has no interval.
    summary(tmp_path, **nothing, extras=mean | {"primary_ci95": [None] * 2}, stream=(buffer := io.StringIO()))
    assert "held-out reward    0.250 -> 2.500\n" in buffer.getvalue()
    # If the reward gave 0 and 1, its mean is an accuracy.
    summary(tmp_path, **FIGURES, extras=mean, stream=(share := io.StringIO()))
    assert "held-out accuracy  0.100 -> 0.750" in share.getvalue() and "brevity" in share.getvalue()


@pytest.mark.parametrize("name", ["lr=$x_$", "$a$b$c^", r"\$\frac"])
def test_plot_takes_no_name_for_a_formula(tmp_path: Path, name: str) -> None:
    writer = MetricsWriter(tmp_path / name)
    writer.write(0, {"eval/primary": 0.5})
    writer.write(1, {"reward/mean": 0.1})
    assert plot(tmp_path / name, name).stat().st_size > 1000


@pytest.mark.parametrize(
    ("rows", "title"),
    [
        ([{"eval/accuracy": 0.5, "eval/accuracy_low": 0.3, "eval/accuracy_high": 0.7}], "accuracy by own"),
        ([{"eval/accuracy": 0.0, "eval/primary": 0.0}, {"eval/primary": 2.5}], "reward by own"),
        ([{"eval/accuracy": 0.0, "eval/primary": 0.0}], "accuracy by own"),
        ([{"eval/primary": 0.0}, {"eval/accuracy": 0.5, "eval/primary": 0.5}], "accuracy by own"),
        ([{"eval/primary": 0.0}], "reward by own"),
    ],
)
def test_plot_names_what_grades(
    tmp_path: Path, rows: list[dict[str, float]], title: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = MetricsWriter(tmp_path)
    for step, row in enumerate(rows):
        writer.write(step, row)
    titles: list[str] = []
    monkeypatch.setattr(report, "_heading", lambda axes, text: titles.append(text))
    drawn: list[int] = []
    errorbar = Axes.errorbar

    def count(axes: Axes, steps: list[int], *args: Any, **options: Any) -> Any:
        drawn.append(len(steps))
        return errorbar(axes, steps, *args, **options)

    monkeypatch.setattr(Axes, "errorbar", count)
    assert plot(tmp_path, "own").stat().st_size > 1000
    assert titles[-1] == f"Held-out {title}, with 95 % interval"
    assert drawn == [len(rows)], "each evaluation has a point"


@pytest.mark.parametrize(
    ("value", "bounds", "words"),
    [
        (0.5, (0.1, 0.9), "+0.500   (95 % interval +0.100 to +0.900), more than chance"),
        (-0.25, (-0.4, -0.1), "-0.250   (95 % interval -0.400 to -0.100), more than chance"),
        (0.5, (0.0, 1.0), "+0.500   (95 % interval +0.000 to +1.000), may be chance; eval.num_problems or"),
        (0.5, (-math.inf, math.inf), "+0.500, may be chance; eval.num_problems or"),
        (0.0, (0.0, 0.0), "+0.000, the same on each held-out problem"),
    ],
)
def test_the_end_says_whether_the_held_out_value_changed(
    tmp_path: Path, value: float, bounds: tuple[float, float], words: str
) -> None:
    change = {"change": value, "change_ci95": bounds}
    summary(tmp_path, **FIGURES, extras=change, sample=["before", "after"], stream=(stream := io.StringIO()))
    lines = stream.getvalue().splitlines()
    assert any(line.startswith(f"  change             {words}") for line in lines)
    end = lines.index(f"Written to {tmp_path}")
    assert lines[end - 2 : end] == ["before", "after"]


@pytest.mark.slow
def test_plot_draws_a_picture_of_the_metrics(tmp_path: Path) -> None:
    from matplotlib.image import imread

    writer = MetricsWriter(tmp_path)
    sizes = []
    for step in range(60):
        metrics = {} if step == 0 else {"reward/mean": None if step == 7 else 1 - math.exp(-step / 20)}
        if step % 20 == 0:
            hits = 20 + 2 * step
            metrics |= {"eval/accuracy": hits / 200}
            metrics["eval/accuracy_low"], metrics["eval/accuracy_high"] = wilson(hits, 200)
        writer.write(step, metrics)
        if step in (0, 59):
            path = plot(tmp_path)
            image = imread(path)
            assert image.shape[0] > 600 and image.shape[1] > 800
            sizes.append(int((image[..., :3].std(axis=-1) > 0.05).sum()))
    assert path == tmp_path / "report.png"
    assert 0 < sizes[0] < sizes[1], "more to draw, more colored ink"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "report.png"]


def test_plot_of_an_empty_run_and_of_none(tmp_path: Path) -> None:
    MetricsWriter(tmp_path).write(1, {"loss": 1.0})
    assert plot(tmp_path).stat().st_size > 1000
    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        plot(tmp_path / "nowhere")


# --- loggers ---------------------------------------------------------------------------------------


def config(*backends: str) -> Config:
    cfg = Config()
    cfg.logging.backends = list(backends)
    cfg.logging.experiment = "exp"
    cfg.logging.table_rows = 16
    return cfg


def test_observe_is_light() -> None:
    code = (
        "import sys\nfrom torchrl_grpo.config import Config\nfrom torchrl_grpo.observe import loggers\n"
        "loggers = loggers.build(Config(), '.')\nloggers.log_scalars({'a': 1.0}, 1)\nloggers.close()\n"
        "print([name for name in ('torch', 'matplotlib', 'wandb') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_unknown_and_missing_loggers_are_the_users_to_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"logging.backends.*'mlflow'.*csv, tensorboard, wandb"):
        build(config("mlflow"), tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"logging.backends.*pip install tensorboard"):
        build(config("csv", "tensorboard"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_csv_logger_and_its_resume(tmp_path: Path) -> None:
    scalars = tmp_path / "csv" / "exp" / "scalars" / "reward" / "mean.csv"
    loggers = build(config("csv", "csv"), tmp_path)
    assert loggers.places == {"csv": tmp_path / "csv"}
    for step in (1, 2, 3):
        loggers.log_scalars({"step": step, "reward/mean": step / 2, "note": "text", "bad": math.nan}, step)
    loggers.close()
    loggers.close()
    assert scalars.read_text() == "1,0.5\n2,1.0\n3,1.5\n"
    hparams = next((tmp_path / "csv" / "exp" / "texts").iterdir()).read_text()
    assert "optimizer.lr: 1e-05" in hparams
    loggers = build(config("csv"), tmp_path, resume_step=2)
    loggers.log_scalars({"reward/mean": 9}, 3)
    loggers.close()
    assert scalars.read_text() == "1,0.5\n2,1.0\n3,9.0\n"


def test_a_logger_gets_no_secret_of_the_configuration(tmp_path: Path) -> None:
    cfg = config("csv")
    cfg.reward.args = {"quality": {"api_key": "a secret"}}
    cfg.env.environment_args = {"token": "a secret"}
    build(cfg, tmp_path).close()
    sent = next((tmp_path / "csv" / "exp" / "texts").iterdir()).read_text()
    assert "optimizer.lr" in sent and "secret" not in sent


def csv_of_a_thousand_steps(tmp_path: Path) -> Path:
    path = tmp_path / "csv" / tmp_path.name / "scalars" / "reward.csv"
    path.parent.mkdir(parents=True)
    path.write_text("".join(f"{step},0.5\n" for step in range(1000)))
    return path


def csv_config() -> Config:
    cfg = Config()
    cfg.logging.backends = ["csv"]
    return cfg


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_disk_that_fills_up_while_a_csv_file_is_cut_loses_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    path = csv_of_a_thousand_steps(tmp_path)
    before = path.read_bytes()

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os if moment == "fsync" else Path, moment, full)
        with pytest.raises(OSError, match=r"No space left on device: .*reward\.csv"):
            build(csv_config(), tmp_path, resume_step=900)
    assert [file.name for file in path.parent.iterdir()] == ["reward.csv"] and path.read_bytes() == before
    build(csv_config(), tmp_path, resume_step=900).close()
    assert path.read_text().splitlines()[-1] == "900,0.5"


def test_a_csv_file_whose_process_is_killed_while_it_is_cut_loses_no_row(tmp_path: Path) -> None:
    path = csv_of_a_thousand_steps(tmp_path)
    before = path.read_bytes()
    code = (
        "import os, sys; from pathlib import Path; from torchrl_grpo.runtime.files import shared_files\n"
        "os.fsync = lambda file: os.kill(os.getpid(), 9)\n"
        "shared_files.replace(Path(sys.argv[1]), 'half')"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -9
    assert path.read_bytes() == before


def test_a_damaged_csv_file_is_one_line(tmp_path: Path) -> None:
    path = csv_of_a_thousand_steps(tmp_path)
    path.write_text("1,0.5\n<<<<\n2,0.5\n")
    with pytest.raises(CheckpointError, match=r"reward.csv: a line does not begin with its step: '<<<<"):
        build(csv_config(), tmp_path, resume_step=900)


def test_tensorboard_logger_and_its_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume_step, steps in ((None, (1, 2, 3)), (2, (3, 4))):
        loggers = build(config("tensorboard"), tmp_path, resume_step=resume_step)
        for step in steps:
            loggers.log_scalars({"reward/mean": step / 2}, step)
        loggers.close()
    events = EventAccumulator(str(tmp_path / "tensorboard" / "exp")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [
        (1, 0.5),
        (2, 1.0),
        (3, 1.5),
        (4, 2.0),
    ]


ROLLOUTS = [
    {"group_id": 0, "prompt": "<b>2+2?", "response": f"<i>{n}\n# x", "reward": n / 2, "advantage": 0.0}
    | {"rewards": {"right": n / 2} | ({"long": 1.0} if n else {})}
    for n in range(100)
]


def test_tensorboard_shows_the_first_responses_as_they_are(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = build(config("tensorboard"), tmp_path)
    loggers.log_rollouts(ROLLOUTS, 3, tmp_path)
    loggers.close()
    events = EventAccumulator(str(tmp_path / "tensorboard" / "exp")).Reload()
    (event,) = events.Tensors("rollouts/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert event.step == 3 and text.count("response, reward") == 4
    # Indented, so that it is neither Markdown nor HTML.
    assert "response, reward 0.5:\n\n    <i>1\n    # x" in text and "\n    <b>2+2?" in text


@pytest.mark.slow
def test_wandb_shows_the_first_responses_as_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    loggers = build(config("wandb"), tmp_path)
    loggers.log_rollouts(ROLLOUTS, 3, tmp_path)
    artifacts: list[Any] = []
    run = loggers.loggers[0].experiment
    monkeypatch.setattr(
        type(run), "log_artifact", lambda self, *args, **options: artifacts.append((args, options))
    )
    loggers.log_report(tmp_path / "report.html")
    assert artifacts == [], "there is none"
    (tmp_path / "report.html").write_text("<!doctype html>")
    loggers._table_rows, table_rows = 0, loggers._table_rows
    loggers.log_report(tmp_path / "report.html")
    assert artifacts == [], "the page has texts, and none is to be sent"
    loggers._table_rows = table_rows
    loggers.log_report(tmp_path / "report.html")
    assert artifacts == [((str(tmp_path / "report.html"),), {"name": f"report-{run.id}", "type": "report"})]
    loggers.close()
    # It keeps these variables for the next run of the process.
    wandb.teardown()
    (file,) = (tmp_path / "wandb").rglob("rollouts*.table.json")
    table = json.loads(file.read_text())
    assert table["columns"] == [
        *("group_id", "prompt", "response", "reward", "advantage", "reward/long", "reward/right")
    ]
    assert len(table["data"]) == 16
    assert table["data"][1] == [0, "<b>2+2?", "<i>1\n# x", 0.5, 0.0, 1.0, 0.5]
    assert table["data"][0][-2:] == [None, 0.0]


class Remembers:
    """A logger of TorchRL that keeps what it is told."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []

    def log_metrics(self, metrics: dict[str, Any], step: int) -> None:
        self.logged.append(metrics)


def test_a_service_gets_text_only_if_it_shall_and_never_more_than_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setattr(wandb, "Table", lambda columns, data: data)
    long = [{**row, "response": "a" * 3_000 + "z" * 3_000} for row in ROLLOUTS]
    assert Config().logging.table_rows == 0
    for rows in (0, 5):
        logger = Remembers()
        loggers = Loggers([logger], {"wandb": Path()}, table_rows=rows)
        loggers.log_rollouts(long, 3, tmp_path)
        tables = [metrics["rollouts"] for metrics in logger.logged]
        assert [len(table) for table in tables] == [rows] * bool(rows)
        texts = {row[2] for table in tables for row in table}
        assert texts <= {"a" * 1_000 + " [...] " + "z" * 1_000} and bool(texts) is bool(rows)
    assert long[0]["response"] == "a" * 3_000 + "z" * 3_000, "rollouts.jsonl has all"


def test_a_table_has_the_pictures_of_prompts_each_once(tmp_path: Path) -> None:
    import wandb

    buffer = io.BytesIO()
    Image.new("RGB", (640, 20), "red").save(buffer, "PNG")
    write_pictures(tmp_path, [{"a.png": buffer.getvalue()}])
    shown = [["a.png", "gone.png"], ["a.png"], []]
    rows = [{**row, "pictures": files} for row, files in zip(ROLLOUTS, shown, strict=False)]
    logger = Remembers()
    Loggers([logger], {"wandb": Path()}, table_rows=4).log_rollouts([*rows, ROLLOUTS[3]], 3, tmp_path)
    ((table,),) = (metrics.values() for metrics in logger.logged)
    assert table.columns[-2:] == ["picture/1", "picture/2"]
    image = table.data[0][-2]
    assert image.image.size == (320, 10)
    assert [row[-2:] for row in table.data] == [[image, None], [image, None], [None, None], [None, None]]
    artifact = wandb.Artifact("rollouts", "table")
    artifact.add(table, "rollouts")
    assert sum(name.endswith(".png") for name in artifact.manifest.entries) == 1


@pytest.mark.parametrize(
    ("grader", "metrics", "plot"),
    [
        ("gsm8k/flexible", {"eval/accuracy": 0.5, "eval/strict": 0.25}, "gsm8k_flexible"),
        ("brevity", {"eval/primary": 0.5, "eval/accuracy": 0.5}, "brevity"),
        ("reasoning_gym (sums), ifeval (b)", {"eval/accuracy": 0.5}, "reasoning_gym_sums_ifeval_b"),
        ("the loss of their solutions", {"eval/loss": 0.5}, "the_loss_of_their_solutions"),
        ("brevity", {"reward/mean": 1.0}, None),
        ("", {"eval/accuracy": 0.5}, None),
    ],
)
def test_the_plot_of_the_held_out_value_names_what_grades(
    grader: str, metrics: dict[str, float], plot: str | None
) -> None:
    logger = Remembers()
    Loggers([logger], grader=grader).log_scalars(metrics, 1)
    named = {} if plot is None else {f"held_out/{plot}": 0.5}
    assert logger.logged == [{**metrics, **named}]


def test_trackio_shows_numbers_and_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchrl.record.loggers import trackio as of_torchrl

    logged: list[tuple[dict[str, Any], int]] = []
    starts: list[dict[str, Any]] = []

    class Run:
        config: ClassVar[dict[str, Any]] = {}

        def log(self, metrics: dict[str, Any], step: int) -> None:
            logged.append((metrics, step))

        def finish(self) -> None:
            logged.append(({}, -1))

    def init(**options: Any) -> Run:
        starts.append(options)
        return Run()

    # The package is large, and only those install it who use it.
    fake = types.ModuleType("trackio")
    fake.__spec__ = importlib.machinery.ModuleSpec("trackio", None)
    artifacts: list[str] = []
    vars(fake).update(
        init=init,
        Table=lambda columns, data: (columns, data),
        log_artifact=lambda path, name, type: artifacts.append(f"{type} {name} {path}"),
    )
    page = tmp_path / "report.html"
    page.touch()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    monkeypatch.setattr(of_torchrl, "_has_trackio", True)
    for _ in range(2):
        loggers = build(config("trackio"), tmp_path)
        loggers.log_scalars({"reward/mean": 0.5}, 1)
        loggers.log_rollouts(ROLLOUTS, 3, tmp_path)
        loggers.log_report(page)
        loggers.close()
    assert artifacts == [f"report report-{starts[0]['name']} {page}"] * 2
    (numbers, first), (table, second), *_ = logged
    assert (numbers, first, second) == ({"reward/mean": 0.5}, 1, 3)
    assert table["rollouts"][0][:3] == ["group_id", "prompt", "response"] and len(table["rollouts"][1]) == 16
    # A resumed run goes on in its own.
    assert starts[0] == starts[1] and starts[0]["name"].startswith("exp-") and starts[0]["resume"] == "allow"
    assert sum(step == -1 for _, step in logged) == 2


@pytest.mark.slow
def test_wandb_is_told_entity_group_and_tags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_RUN_GROUP", "nights")
    cfg = config("wandb")
    cfg.logging.entity, cfg.logging.tags = "my-team", ["baseline", "small"]
    for name, group, expected in (("a", None, "nights"), ("b", "sweep 1", "sweep 1")):
        cfg.logging.group = group
        loggers = build(cfg, tmp_path / name)
        run = wandb.run
        assert run is not None
        assert (run.entity, run.group, run.tags) == ("my-team", expected, ("baseline", "small"))
        assert run.project == cfg.logging.project
        loggers.close()


@pytest.mark.slow
def test_wandb_records_offline_without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    loggers = build(config("wandb"), tmp_path)
    loggers.log_scalars({"reward/mean": 0.5}, 1)
    loggers.close()
    runs = list((tmp_path / "wandb").rglob("offline-run-*"))
    assert runs and any("wandb sync" in note for note in loggers.notes)
    assert "WANDB_MODE" not in os.environ, "a later job of the same process must choose for itself"
    for command_glob in [note.split("`")[1].removeprefix("wandb sync ") for note in loggers.notes]:
        parent, pattern = command_glob.rsplit("/", 1)
        assert list(Path(parent).glob(pattern)), command_glob


def wandb_server(answer: str, wait: float = 0.0) -> Iterator[str]:
    """A server that answers every request alike, after a while."""

    class Handler(BaseHTTPRequestHandler):
        def respond(self) -> None:
            time.sleep(wait)
            self.send_response(int(answer))
            self.send_header("content-length", "0")
            self.end_headers()

        do_HEAD = do_GET = do_POST = respond

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "mode"),
    [
        ("nobody listens", None),
        ("nobody listens", "online"),
        ("no such host", None),
        ("it hangs", None),
        ("it is down", None),
        ("its proxy is down", None),
    ],
)
def test_wandb_records_offline_if_its_server_cannot_be_reached(
    fault: str, mode: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("WANDB_MODE", mode)
    monkeypatch.setattr(wandb_login, "_LIMIT_S", 0.5)
    with contextlib.ExitStack() as stack:
        serving = contextlib.contextmanager(wandb_server)
        with socket.create_server(("127.0.0.1", 0)) as closed:
            nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
        url, why = nobody, "Connection refused"
        if fault == "no such host":
            url, why = "https://no.such.invalid", ""
        elif fault == "it hangs":
            url, why = stack.enter_context(serving("200", wait=1.0)), "timed out|no answer within 0.5 s"
        elif fault == "it is down":
            url, why = stack.enter_context(serving("503")), "HTTP status 503"
        elif fault == "its proxy is down":
            monkeypatch.setenv("http_proxy", nobody)
            url = "http://wandb.invalid"
        monkeypatch.setenv("WANDB_BASE_URL", url)
        loggers = build(config("wandb"), tmp_path)
        loggers.log_scalars({"reward/mean": 0.5}, 1)
        loggers.close()
    (note,) = loggers.notes
    assert re.search(
        rf"^W&B cannot reach {url} \(.*({why}).*\) and records offline; upload with `wandb sync ", note
    )
    assert list((tmp_path / "wandb").rglob("offline-run-*"))


@pytest.mark.slow
def test_wandb_records_offline_if_its_server_refuses_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    # It remembers the mode of other tests.
    wandb.teardown()
    with contextlib.contextmanager(wandb_server)("401") as url:
        monkeypatch.setenv("WANDB_BASE_URL", url)
        loggers = build(config("wandb"), tmp_path)
        loggers.log_scalars({"reward/mean": 0.5}, 1)
        loggers.close()
    (note,) = loggers.notes
    assert re.search(r"^W&B cannot use its server \(.+\) and records offline; upload with `wandb sync ", note)
    assert list((tmp_path / "wandb").rglob("offline-run-*"))


def test_a_server_of_wandb_that_answers_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    for answer in ("200", "404", "401"):
        with contextlib.contextmanager(wandb_server)(answer) as url:
            monkeypatch.setenv("WANDB_BASE_URL", url)
            monkeypatch.delenv("WANDB_MODE", raising=False)
            assert wandb_login.offline_reason() is None
    # It is not asked where the user has decided.
    for mode in ("offline", "disabled", "dryrun"):
        monkeypatch.setenv("WANDB_MODE", mode)
        assert wandb_login.offline_reason() is None


@pytest.mark.parametrize(
    ("text", "ended"),
    [('{"steps": 5}', True), ('{"steps": 6}', False), ('{"st', False), ("[]", False), ("{}", False)],
)
def test_only_a_whole_summary_of_that_step_says_that_a_run_has_ended(
    tmp_path: Path, text: str, ended: bool
) -> None:
    assert of_ended_run(tmp_path, 5) is None
    (tmp_path / SUMMARY).write_text(text)
    assert of_ended_run(tmp_path, 5) == ({"steps": 5} if ended else None)
