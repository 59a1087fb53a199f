"""Processes that end with everything they have started, and calls that end within their limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_ends import alive, child_of, error_in_time, wait_for_end

from torchrl_grpo.runtime.json_channel import (
    ChannelBroken,
    ChannelClosed,
    ChannelTimeout,
    JsonChannel,
    RemoteError,
)
from torchrl_grpo.runtime.supervised import SupervisedProcess

# A module that answers requests, and does other things when a request says so.
ANSWERS = """
import json, os, socket, subprocess, sys, time

own = socket.socket(fileno=int(sys.argv[1]))
own.sendall(b'{"id": "ready"}\\n')
lines = own.makefile("r")
for text in lines:
    request = json.loads(text)
    payload = request["payload"]
    value = payload["do"]
    answer = json.dumps({"id": request["id"], "value": value}).encode() + b"\\n"
    if value == "size":
        answer = json.dumps({"id": request["id"], "value": len(payload["text"])}).encode() + b"\\n"
    elif value == "forge":
        own.sendall(b'{"value": "forged"}\\n{"id": "ready", "value": "forged"}\\n[1]\\n')
        answer += b'{"id": "0123456789abcdef", "value": "forged"}\\n'
    elif value in ("garbage", "deep", "digits"):
        long = {"garbage": b"no JSON", "deep": b"[" * 100_000, "digits": b"1" * 10_000 + b"}"}[value]
        answer = json.dumps({"id": request["id"]}).encode()[:-1] + b', "value": ' + long + b"\\n"
    elif value == "flood":
        while True:
            own.sendall(b"x" * 65_536)
    elif value == "lines":
        while True:
            own.sendall(b'{"id": "0"}\\n' * 1_000)
    elif value == "long lines":
        long = b'{"id": "0", "x": [' + b"[]," * 1_000_000 + b"0]}\\n"
        while True:
            own.sendall(long)
    elif value == "stops its group":
        os.killpg(0, 19)
    elif value == "ends its group":
        os.killpg(0, 15)
    elif value == "raise":
        answer = json.dumps({"id": request["id"], "error": "KeyError: 1"}).encode() + b"\\n"
    elif value == "exit":
        os._exit(3)
    elif value == "start":
        # In its group, in a session of its own, and as a daemon that nobody is the parent of.
        command = ["sleep", "600"]
        started = [subprocess.Popen(command), subprocess.Popen(command, start_new_session=True)]
        daemon = "import os, time\\nif os.fork(): os._exit(0)\\nos.setsid()\\nif os.fork(): os._exit(0)\\n"
        daemon += "print(os.getpid(), flush=True)\\nos.close(1)\\ntime.sleep(600)"
        code = [sys.executable, "-c", daemon]
        number = int(subprocess.run(code, stdout=subprocess.PIPE, check=True).stdout)
        answer = json.dumps({"id": request["id"], "value": [one.pid for one in started] + [number]}).encode()
        answer += b"\\n"
    elif value == "never reads":
        own.sendall(answer)
        time.sleep(600)
    own.sendall(answer)
"""


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("modules")
    (folder / "answers_requests.py").write_text(ANSWERS)
    sys.path.append(str(folder))
    yield
    sys.path.remove(str(folder))


@pytest.fixture
def process() -> Iterator[SupervisedProcess]:
    made = SupervisedProcess("answers_requests")
    yield made
    made.end()
    made.socket.close()


@pytest.fixture
def channel(process: SupervisedProcess) -> JsonChannel:
    made = JsonChannel(process.socket.fileno())
    made.wait_until_ready(60.0)
    return made


@pytest.mark.parametrize("size", [10, 65_536, 10_000_000])
def test_a_request_of_any_size_arrives(channel: JsonChannel, size: int) -> None:
    assert channel.ask({"do": "size", "text": "x" * size}, 60.0) == size


def test_an_answer_that_nobody_asked_for_is_dropped(channel: JsonChannel) -> None:
    assert channel.ask({"do": "forge"}, 60.0) == "forge"
    assert channel.ask({"do": "next"}, 60.0) == "next"


@pytest.mark.parametrize("what", ["garbage", "deep", "digits"])
def test_what_is_no_answer_breaks_the_channel(channel: JsonChannel, what: str) -> None:
    with pytest.raises(ChannelBroken):
        channel.ask({"do": what}, 60.0)


def test_an_error_and_an_end_are_told_apart(channel: JsonChannel, process: SupervisedProcess) -> None:
    with pytest.raises(RemoteError, match="KeyError: 1"):
        channel.ask({"do": "raise"}, 60.0)
    with pytest.raises(ChannelClosed):
        channel.ask({"do": "exit"}, 60.0)
    assert process.end() == 3


@pytest.mark.parametrize("size", [10, 200_000, 10_000_000])
@pytest.mark.parametrize("how", ["stopped", "never reads", "flood", "lines", "long lines"])
def test_no_call_takes_longer_than_its_limit(
    channel: JsonChannel, process: SupervisedProcess, how: str, size: int
) -> None:
    if how == "stopped":
        os.kill(child_of(process.process.pid), signal.SIGSTOP)
    if how == "never reads":
        assert channel.ask({"do": how}, 60.0) == how
    error = error_in_time(lambda: channel.ask({"do": how, "text": "x" * size}, 0.2))
    assert isinstance(error, ChannelTimeout | ChannelBroken)
    assert error_in_time(process.end) is None
    assert process.process.returncode is not None


def test_everything_ends_with_the_process(channel: JsonChannel, process: SupervisedProcess) -> None:
    numbers = channel.ask({"do": "start"}, 60.0)
    assert len(numbers) == 3 and all(alive(number) for number in numbers)
    process.end()
    wait_for_end(*numbers)


@pytest.mark.parametrize("how", ["stops its group", "ends its group"])
def test_a_signal_to_the_group_of_the_module_does_not_reach_the_supervisor(
    channel: JsonChannel, process: SupervisedProcess, how: str
) -> None:
    numbers = channel.ask({"do": "start"}, 60.0)
    with pytest.raises((ChannelTimeout, ChannelClosed)):
        channel.ask({"do": how}, 0.2)
    process.end()
    wait_for_end(*numbers)


def test_a_fork_that_keeps_the_pipe_open_does_not_keep_the_supervisor(
    channel: JsonChannel, process: SupervisedProcess
) -> None:
    numbers = channel.ask({"do": "start"}, 60.0)
    assert process.process.stdin is not None
    kept = os.dup(process.process.stdin.fileno())
    try:
        process.end()
        wait_for_end(*numbers, process.process.pid)
    finally:
        os.close(kept)


def test_everything_ends_when_the_module_does(channel: JsonChannel, process: SupervisedProcess) -> None:
    numbers = channel.ask({"do": "start"}, 60.0)
    with pytest.raises(ChannelClosed):
        channel.ask({"do": "exit"}, 60.0)
    wait_for_end(*numbers)


def test_everything_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    code = f"""
import os, sys, time
sys.path += {sys.path!r}
from torchrl_grpo.runtime.json_channel import JsonChannel
from torchrl_grpo.runtime.supervised import SupervisedProcess
process = SupervisedProcess("answers_requests")
if os.fork() == 0:
    # A fork keeps the supervisor's pipe open.
    time.sleep(600)
channel = JsonChannel(process.socket.fileno())
channel.wait_until_ready(60.0)
print(process.process.pid, *channel.ask({{"do": "start"}}, 60.0), flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert parent.stdout is not None
    with parent.stdout:
        numbers = [int(number) for number in parent.stdout.readline().split()]
        try:
            assert len(numbers) == 4
            os.kill(parent.pid, signal.SIGKILL)
            parent.wait()
            wait_for_end(*numbers)
        finally:
            os.killpg(parent.pid, signal.SIGKILL)
