"""Checkpoints that are written while the run goes on."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import forked  # noqa: F401  its processes begin with torch imported
import killed_writes
import pytest
import torch
from pretended_cuda import PretendedCuda

from torchrl_grpo.checkpoints import checkpoint
from torchrl_grpo.checkpoints.background import BackgroundWriter
from torchrl_grpo.distributed import host_copies
from torchrl_grpo.distributed.host_copies import HostCopies


def test_an_update_waits_for_what_is_read_and_the_next_write_for_the_whole_one() -> None:
    writer, go_on, done = BackgroundWriter(), [threading.Event() for _ in range(2)], list[str]()

    def write(has_read: Callable[[], None]) -> None:
        go_on[0].wait()
        done.append("read")
        has_read()
        go_on[1].wait()
        done.append("written")

    writer.wait_until_read()
    writer.start(1, write)
    writer.check()
    assert done == []
    go_on[0].set()
    writer.wait_until_read()
    assert done == ["read"]
    go_on[1].set()
    writer.start(2, lambda has_read: done.append("the next"))
    writer.wait_until_read()
    writer.close()
    assert done == ["read", "written", "the next"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no priority of their own")
def test_a_write_leaves_the_cores_to_the_run() -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    writer, usual, priorities = BackgroundWriter(), priority(), list[int]()
    writer.start(1, lambda has_read: priorities.append(priority()))
    writer.finish()
    assert priorities == [min(19, usual + 10)] and priority() == usual


@pytest.mark.parametrize("seen_by", ["check", "finish", "start"])
def test_the_error_of_a_write_is_raised_once_and_holds_no_update_up(seen_by: str) -> None:
    def fail(has_read: Callable[[], None]) -> None:
        raise OSError("no room")

    def check_at_the_end() -> None:
        assert writer._write is not None
        writer._write.exception()
        writer.check()

    writer, after = BackgroundWriter(), list[str]()
    writer.start(1, fail)
    writer.wait_until_read()
    see: dict[str, Callable[[], None]] = {
        "check": check_at_the_end,
        "finish": writer.finish,
        "start": lambda: writer.start(2, lambda has_read: after.append("written")),
    }
    with pytest.raises(OSError, match="no room"):
        see[seen_by]()
    writer.check()
    writer.close()
    assert after == []


_INTERRUPTED = """
import signal, sys, threading
import numpy
from safetensors.numpy import save_file
from torchrl_grpo.checkpoints.background import BackgroundWriter
from torchrl_grpo.cli.endings import exit_codes

begun = threading.Event()

def write(has_read):
    while True:
        save_file({"weights": numpy.zeros(1_000_000)}, sys.argv[1])
        begun.set()

with exit_codes():
    writer = BackgroundWriter()
    writer.start(5, write)
    begun.wait()
    try:
        signal.raise_signal(int(sys.argv[2]))
    finally:
        writer.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "ending"), [(signal.SIGINT, (130, "interrupted\n")), (signal.SIGTERM, (143, "terminated\n"))]
)
def test_a_second_interrupt_ends_a_process_that_waits_for_its_write(
    number: signal.Signals, ending: tuple[int, str], tmp_path: Path
) -> None:
    arguments = ["-c", _INTERRUPTED, str(tmp_path / "weights"), str(int(number))]
    process = subprocess.Popen([sys.executable, *arguments], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    with process:
        try:
            assert process.stderr.readline() == (
                "The checkpoint of step 5 is still being written; interrupt again to end without it.\n"
            )
            process.send_signal(number)
            error = process.stderr.read()
            assert (process.wait(), error) == ending
        finally:
            process.kill()


@pytest.mark.parametrize("has_begun", [False, True])
def test_an_interrupt_while_a_write_begins_leaves_nobody_waiting(
    has_begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, done, start = threading.Event(), threading.Event(), list[str](), threading.Thread.start

    def interrupt(thread: threading.Thread) -> None:
        if has_begun:
            start(thread)
            begun.wait()
        raise KeyboardInterrupt

    def write(has_read: Callable[[], None]) -> None:
        begun.set()
        go_on.wait()
        done.append("written")

    writer = BackgroundWriter()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupt)
        with pytest.raises(KeyboardInterrupt):
            writer.start(1, write)
    go_on.set()
    writer.wait_until_read()
    writer.close()
    assert done == (["written"] if has_begun else [])


@pytest.mark.slow
def test_a_kill_at_any_moment_of_a_write_loses_nothing(tmp_path: Path) -> None:
    context, survivors, whole = multiprocessing.get_context("forkserver"), list[int](), tmp_path / "whole"
    writer = BackgroundWriter()
    killed_writes.save(whole, 5, writer)
    writer.close()
    for number in itertools.count(1):
        run_dir = tmp_path / str(number)
        shutil.copytree(whole, run_dir)
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=killed_writes.save_and_stop, args=(run_dir, 10, number, send))
        process.start()
        send.close()
        was_stopped = receive.recv()
        process.kill()
        process.join()
        checkpoint.clean(run_dir)
        folder = checkpoint.find(run_dir, "auto")
        state, step = checkpoint.load_state(folder), int(folder.name)
        expected = torch.full((2**16,), float(step))
        assert state["step"] == step and torch.equal(state["weights"], expected)
        assert (folder / "model/model.safetensors").read_bytes() == expected.numpy().tobytes()
        survivors.append(step)
        # Nothing else is left, but an older one whose removal had not begun.
        assert {path.name for path in (run_dir / "checkpoints").iterdir()} <= {"5", str(step)}
        if not was_stopped:
            break
    assert survivors == sorted(survivors) and set(survivors) == {5, 10}
    assert len(survivors) > 20, survivors


@pytest.mark.parametrize("has_room", [True, False])
def test_what_comes_from_a_gpu_is_copied_once_and_stays_tied(
    has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 24 bytes, for which torch pins 32.
    monkeypatch.setattr(host_copies, "available_gib", lambda: (65 if has_room else 63) / 2**30)
    with PretendedCuda():
        tied, moment = torch.arange(6.0).to("cuda"), torch.ones(3)
        content = {"weights": {"a": tied, "b": tied.detach()}, "state": [moment, (2, "text")]}
        copies = HostCopies()
        copied = copies(content, torch.device("cuda:0"))
        tied.fill_(-1.0)
        assert copied["weights"]["a"] is copied["weights"]["b"]
        assert copied["weights"]["a"].device.type == "cpu"
        assert copied["weights"]["a"].tolist() == [0, 1, 2, 3, 4, 5]
        # What is in host memory is not copied, so the writer must have written it before an update.
        assert copied["state"][0] is moment and copied["state"][1] == (2, "text")
        # The next checkpoint writes into the same memory, if that is pinned.
        again = copies(content, torch.device("cuda:0"))
        assert again["weights"]["a"].tolist() == [-1.0] * 6 and copies.nbytes == (32 if has_room else 0)
        assert (again["weights"]["a"] is copied["weights"]["a"]) == has_room
        assert copies({"one": moment.to("cuda")}, torch.device("cuda:0"))["one"].tolist() == [1.0] * 3


@pytest.mark.parametrize(("text", "is_raised"), [("CUDA error: out of memory", False), ("driver gone", True)])
def test_what_cannot_be_pinned_lies_in_ordinary_memory(
    text: str, is_raised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, emptied = list[object](), list[bool]()

    def refuse(*shape: object, **__: object) -> torch.Tensor:
        tried.append(shape)
        raise RuntimeError(text)

    with PretendedCuda():
        tensor, copies = torch.arange(6.0).to("cuda"), HostCopies()
        monkeypatch.setattr(torch, "empty", refuse)
        monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: emptied.append(True))
        for _ in range(2):
            with pytest.raises(RuntimeError, match=text) if is_raised else contextlib.nullcontext():
                assert copies([tensor], torch.device("cuda:0"))[0].tolist() == [0, 1, 2, 3, 4, 5]
        assert copies.nbytes == 0
        # It is not tried again, and what was pinned before goes back.
        assert (len(tried), len(emptied)) == ((2, 0) if is_raised else (1, 1))
