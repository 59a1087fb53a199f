"""The processes of the user's environments and tools: what they do wrong costs a call, and never the run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from process_ends import alive, child_of, error_in_time, wait_for_end

from torchrl_grpo.envs.episodes.processes import (
    CallError,
    CallTimeout,
    EpisodeHost,
    EpisodeProcess,
    UserCodeSpec,
)
from torchrl_grpo.errors import TrainingStopped

CODE = '''
import json, os, subprocess, sys, threading, time

helper = subprocess.Popen(["sleep", "600"], start_new_session=True)


def helpers() -> int:
    """Say who helps."""
    return helper.pid


def sockets():
    files = [f"/proc/self/fd/{n}" for n in range(3, 64)]
    return [int(file[14:]) for file in files if os.path.exists(file) and "socket" in os.readlink(file)]


def forge(text: str) -> str:
    """Write answers of its own.

    Args:
        text: The true result.
    """
    for number in sockets():
        os.write(number, b'{"value": "forged"}\\n{"id": "ready", "value": "forged"}\\n')
    return text


def flood(text: str) -> str:
    """Write without end.

    Args:
        text: Any.
    """
    while True:
        for number in sockets():
            os.write(number, b"x" * 65_536)


def size(text: str) -> int:
    """Return the size of a text.

    Args:
        text: The text.
    """
    return len(text)


def leave(text: str) -> str:
    """End, and leave a process behind that keeps the socket open.

    Args:
        text: Any.
    """
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
    os._exit(0)
'''


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], EpisodeHost]]:
    (tmp_path / "my_tools.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    hosts = []

    def build() -> EpisodeHost:
        names = ("helpers", "forge", "flood", "size", "leave")
        hosts.append(
            EpisodeHost(UserCodeSpec(tools=[f"my_tools.py:{name}" for name in names], has_tools=True))
        )
        return hosts[-1]

    yield build
    for host in hosts:
        host.close()


def call(episode: EpisodeProcess, tool: str, limit_s: float = 60.0, **arguments: Any) -> Any:
    return episode.call({"do": "tool", "tool": f"my_tools.py:{tool}", "arguments": arguments}, limit_s)


def test_a_tool_cannot_answer_for_the_next_call(make: Callable[[], EpisodeHost]) -> None:
    episode = make().start_episode()
    assert call(episode, "forge", text="first") == "first"
    assert call(episode, "size", text="second") == "6"


@pytest.mark.slow
@pytest.mark.parametrize("size", [10, 200_000, 10_000_000])
def test_a_call_ends_within_its_limit_whatever_the_processes_do(
    make: Callable[[], EpisodeHost], size: int
) -> None:
    host = make()
    text = "x" * size
    assert call(host.start_episode(), "size", text=text) == str(size)
    error = error_in_time(lambda: call(host.start_episode(), "flood", 0.5, text=text))
    assert isinstance(error, CallError)
    error = error_in_time(lambda: call(host.start_episode(), "leave", 30.0, text=text))
    assert isinstance(error, CallError) and not isinstance(error, CallTimeout)
    os.kill(child_of(host._process.pid), signal.SIGSTOP)
    for _ in range(3):
        error = error_in_time(lambda: call(host.start_episode(), "size", 0.2, text=text))
        assert isinstance(error, CallTimeout)
    os.kill(child_of(host._process.pid), signal.SIGCONT)
    assert call(host.start_episode(), "size", text=text) == str(size)
    os.kill(child_of(host._process.pid), signal.SIGSTOP)
    assert error_in_time(host.close) is None


def test_what_a_module_started_when_it_was_imported_ends_with_the_host(
    make: Callable[[], EpisodeHost],
) -> None:
    host = make()
    helper = int(call(host.start_episode(), "helpers"))
    assert alive(helper)
    assert int(call(host.start_episode(), "helpers")) == helper
    assert error_in_time(host.close) is None
    wait_for_end(helper)


def test_a_killed_host_stops_the_run_and_leaves_nothing(make: Callable[[], EpisodeHost]) -> None:
    host = make()
    episode = host.start_episode()
    helper = int(call(episode, "helpers"))
    os.kill(child_of(host._process.pid), signal.SIGKILL)
    host._process.wait(20)
    with pytest.raises(TrainingStopped, match="resume=auto"):
        call(episode, "helpers")
    with pytest.raises(TrainingStopped, match="resume=auto"):
        host.start_episode()
    wait_for_end(helper)
