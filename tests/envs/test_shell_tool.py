"""The shell tool: what command lines of a model may do, what they may take, and what is left of them."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from process_ends import wait_for_end
from transformers import AutoTokenizer

from torchrl_grpo.config import Config
from torchrl_grpo.config.checks.data import check_data
from torchrl_grpo.data.example import Example
from torchrl_grpo.data.problems import Problems
from torchrl_grpo.envs.episodes.build import check_environment, with_prompts
from torchrl_grpo.envs.episodes.runner import EpisodeRunner, RunnerOptions
from torchrl_grpo.envs.episodes.shell_task import ShellTask, check_row
from torchrl_grpo.envs.episodes.tools import python_tool, shell_tool
from torchrl_grpo.envs.episodes.tools.python_tool import CodeFailed, NotRun
from torchrl_grpo.envs.episodes.tools.shell_tool import ShellFolder
from torchrl_grpo.errors import ConfigError, DataError

# Runs a command, and is killed meanwhile.
_KILLED = """
import sys
from torchrl_grpo.envs.episodes.tools.shell_tool import ShellFolder
ShellFolder().run({"command": sys.argv[1]}, 100.0)
"""
_SPAWN = """import os
os.waitpid(os.posix_spawn("/bin/echo", ["echo", "made"], {}, resetids=True), 0)"""
_CLONE, _RENAMEAT2, _FCHMODAT = {"x86_64": (56, 316, 268), "aarch64": (220, 276, 53)}[os.uname().machine]
# A program that makes a system call, and fails if the call does.
_CALL = "python3 -c 'import ctypes; exit(ctypes.CDLL(None).syscall({}) < 0)'"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files."""
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    return place


@pytest.fixture
def folder(place: Path) -> Iterator[ShellFolder]:
    made = ShellFolder()
    yield made
    close(made)


def close(folder: ShellFolder) -> None:
    """Close a folder, and wait until it is gone."""
    folder.close()
    for thread in threading.enumerate():
        if thread.name == "shell-folder":
            thread.join(60)
            assert not thread.is_alive()


def run(folder: ShellFolder, command: str, limit_s: float = 30.0) -> str:
    return folder.run({"command": command}, limit_s)


def test_the_sandbox_works_on_this_machine() -> None:
    assert shell_tool.why_unavailable() is None


@pytest.mark.slow
def test_programs_work_and_files_stay_for_the_episode(folder: ShellFolder, place: Path) -> None:
    program = '#!/bin/sh\necho "ran $1"\n'
    for command, printed in {
        "echo kept > note; mkdir -p a/b; cp -p note a/b; ls -R a": "a:\nb\n\na/b:\nnote",
        "cat note a/b/note | sort -u; seq 3 | while read n; do echo $((n + 1)); done": "kept\n2\n3\n4",
        f"printf '{program}' > run.sh && chmod +x run.sh && ./run.sh again; stat -c %a run.sh": (
            "ran again\n700"
        ),
        "cat <(echo sub) - <<EOF\ntext\nEOF": "sub\ntext",
        "sleep 60 & kill $!; wait $!; echo $?": "143",
        "timeout 0.1 sleep 60; echo $?; sed -i s/kept/kept/ note": "124",
        # Processes that have ended take no room, also if their parents ended before them.
        "for n in $(seq 40); do (true & ); done; echo ok": "ok",
        "touch from; mv -n from to; ls to; rm to": "to",
        # The first files may be large. That without content is none of them.
        "for n in $(seq 40); do : 2> /dev/null; done; head -c 99999 /dev/zero > to; wc -c < to": "99999",
        # As make starts programs.
        f"python3 -c '{_SPAWN}'": "made",
        "yes | head -1; ln -s note link; cat link; mv a c; find c -name note": "y\nkept\nc/b/note",
        "chmod -R u+w c; touch -d 2001-01-01 note; rm -r c; test -e c": "exit status 1",
        "pwd | grep -c grpo-; echo $HOME | grep -c grpo-; wc -c < /dev/null": "1\n1\n0",
        "python3 -c 'import json; print(json.dumps([1]))'": "[1]",
        "echo out; echo err >&2; exit 3": "out\nerr\nexit status 3",
        "kill -9 $$": "exit status -9",
    }.items():
        assert run(folder, command) == printed
    other = ShellFolder()
    assert run(other, "ls -A") == ""
    close(other)
    assert len(list(place.iterdir())) == 1
    close(folder)
    assert list(place.iterdir()) == []


@pytest.mark.slow
def test_commands_reach_nothing_but_their_folder(
    folder: ShellFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hidden-value")
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    (mine / "file").write_text("private")
    (mine / "file").chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for command in (
            f"cat {mine}/file",
            f"ls {mine}",
            f"echo x > {mine}/new",
            f"rm {mine}/file",
            f"mv {mine}/file taken",
            f"ln {mine}/file taken",
            f"ln -s {mine}/file link; cat link",
            f"chmod 777 {mine}/file",
            f"ln -s {mine} links; chmod 777 links/file",
            f"cd {mine} && chmod 777 file",
            f"exec 3<>/dev/tcp/127.0.0.1/{port}",
            f"kill -9 {os.getpid()}",
            "kill -9 $PPID",
            "kill -9 -1",
            "kill 0",
            f"kill -9 -- -{os.getpgrp()}",
            f"cat /proc/{os.getpid()}/environ",
            "ls /proc",
            "ls /root",
            "ls /home",
            "mkfifo pipe",
            "python3 -c 'import resource as r, os; r.prlimit(os.getppid(), r.RLIMIT_CPU, (1, 1))'",
            "python3 -c 'import os; os.setsid()'",
            "python3 -c 'import os; os.setpgid(0, 0)'",
            "python3 -c 'import os; os.chmod(os.__file__, 0)'",
            # What can be read cannot be emptied by that.
            "python3 -c 'import os; os.open(os.__file__, os.O_RDONLY | os.O_TRUNC)'",
            "python3 -c 'import os; os.fchmod(os.open(os.__file__, 0), 0)'",
            "python3 -c 'import os; os.memfd_create(\"a\")'",
            # Processes in a new namespace, and with open files that are shared.
            _CALL.format(f"{_CLONE}, 0x10000011, 0, 0, 0"),
            _CALL.format(f"{_CLONE}, 0x411, 0, 0, 0"),
            # A device in the place of a file.
            "touch a; " + _CALL.format(f'{_RENAMEAT2}, -100, b"a", -100, b"b", 4'),
            # Memory that stays after the end of the process in which it counted.
            "python3 -c 'import mmap; mmap.mmap(-1, 4096)'",
            "python3 -c 'import os; os.open(\"/dev/zero\", os.O_RDWR)'",
            # An address that no process has.
            _CALL.format(f"{_FCHMODAT}, -100, ctypes.c_ulong(2**63), 0o700"),
            f"python3 -c 'import ctypes; exit(ctypes.CDLL(None).ptrace(16, {os.getpid()}, 0, 0) < 0)'",
        ):
            assert "exit status" in run(folder, command), command
    # What changes nothing reports success.
    run(folder, f"chown 12345 {mine}/file; touch -d 2001-01-01 {mine}/file")
    status = (mine / "file").stat()
    assert (status.st_mode & 0o777, status.st_uid) == (0o600, os.getuid())
    assert (mine / "file").read_text() == "private"
    assert time.time() - status.st_mtime < 3_600 and list(mine.iterdir()) == [mine / "file"]
    assert "hidden-value" not in run(folder, "env; set")


# A process whose parent has ended, after it has printed its number.
_ORPHAN = """import os, time
reads, writes = os.pipe()
if os.fork():
    os.read(reads, 1)
    os._exit(0)
print(os.getpid(), flush=True)
os.write(writes, b"-")
time.sleep(1000)"""


def test_a_call_ends_with_all_that_it_has_started(folder: ShellFolder) -> None:
    started = run(
        folder,
        "trap '' TERM HUP INT\nsleep 1000 & echo $!\n(sleep 1000 & echo $!)\n"
        f"nohup sleep 1000 > /dev/null 2>&1 & echo $!\npython3 -c '{_ORPHAN}'",
    )
    numbers = [int(number) for number in started.split()]
    assert len(numbers) == 4
    wait_for_end(*numbers)


@pytest.mark.slow
def test_what_a_command_takes_is_bounded(folder: ShellFolder, place: Path) -> None:
    python = "python3 -c"
    assert run(
        folder,
        f"{python} '\nimport os, time\nn = 0\ntry:\n  while True:\n"
        "    if os.fork() == 0: time.sleep(1000)\n    n += 1\n"
        "except OSError as error: print(n < 32, error)'",
    ) == ("True [Errno 11] Resource temporarily unavailable")
    # A bomb ends with the time of its call.
    with pytest.raises(CodeFailed, match="longer than 2 s"):
        run(folder, "bomb() { bomb | bomb & bomb; }; bomb; while true; do :; done", 2.0)
    with pytest.raises(CodeFailed, match="used more than 1024 MiB of memory"):
        run(
            folder,
            f"{python} '\nimport os, time\nfor _ in range(8):\n"
            "  if os.fork() == 0:\n    kept = bytearray(300 << 20); time.sleep(1000)\ntime.sleep(1000)'",
        )
    with pytest.raises(CodeFailed, match="printed more than"):
        run(folder, "yes & yes & wait")
    assert run(folder, "echo still here") == "still here"
    # Several processes, in several calls, fill no more than the folder may have.
    fill = (
        f"{python} '\nimport os, sys\nos.fork()\nfor n in range(3000):\n  try:\n"
        '    os.write(os.open(f"{os.getpid()} {n}", os.O_CREAT | os.O_WRONLY), bytes(1 << 20))\n'
        "  except OSError: pass\n  try: os.close(3)\n  except OSError: pass'; ls | wc -l"
    )
    for _ in range(3):
        run(folder, fill, 120.0)
    (path,) = place.iterdir()
    files = [file.stat() for file in path.iterdir()]
    assert 100 < len(files) <= 1000 and 2**25 < sum(512 * file.st_blocks for file in files) <= 2**26
    assert "No space left" in run(folder, "for n in $(seq 200); do mkdir d$n; done")
    # The next call can use the room of what was deleted.
    assert run(folder, "rm -r ./*; ls") == ""
    assert run(folder, "echo again > file; cat file") == "again"


def test_a_folder_is_removed_whatever_is_in_it(folder: ShellFolder, place: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    run(
        folder,
        f"ln -s {kept} link; ln -s {kept}/file file; mkdir -p a/b/c; ln -s {kept} a/b/c/link; chmod 0 a/b\n"
        "chmod 0 a; mkdir -m 0 closed; touch -- -rf '*' \"$(printf 'new\\nline')\"; mkdir .hidden",
    )
    (path,) = place.iterdir()
    close(folder)
    assert not path.exists() and list(kept.iterdir()) == [kept / "file"]


def test_a_command_ends_with_the_run_and_the_next_run_removes_its_folder(tmp_path: Path, place: Path) -> None:
    command = "mkdir started; (trap '' TERM; sleep 1000) & sleep 1000"
    process = subprocess.Popen(
        [sys.executable, "-c", _KILLED, command], env={**os.environ, "TMPDIR": str(place)}, text=True
    )
    end = time.monotonic() + 60
    while not list(place.glob("grpo-python-*/started")):
        assert time.monotonic() < end and process.poll() is None, "the command did not start"
        os.sched_yield()
    (watcher,) = (
        int(child) for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    )
    ended = os.pidfd_open(watcher)
    process.kill()
    process.wait()
    # It ends when all processes of the command have.
    assert select.select([ended], [], [], 60)[0]
    os.close(ended)
    script = "from torchrl_grpo.envs.episodes.tools import python_tool as p; p.remove_abandoned()"
    subprocess.run([sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(place)}, check=True)
    assert list(place.iterdir()) == []


ROW = {
    "setup": "seq 10 > numbers; echo started > log",
    "check": 'test "$(cat sum)" = 55 && ! test -e /etc/hosts/x',
}


def example(**columns: Any) -> Example:
    return Example(
        "row/1", [{"role": "user", "content": "Write the sum of numbers to sum."}], columns=columns
    )


def played(row: dict[str, str], *commands: str, max_turns: int = 8) -> EpisodeRunner:
    """Play an episode of a row. The last message has no call, unless there are ``max_turns`` commands."""
    options = RunnerOptions(
        {"shell": shell_tool.build()}, partial(ShellTask), False, None, 30.0, 2_000, max_turns=max_turns
    )
    runner = EpisodeRunner(options, example(**row))
    for command in commands:
        call = json.dumps({"name": "shell", "arguments": {"command": command}})
        runner.step(f"<tool_call>{call}</tool_call>")
    if len(commands) < max_turns:
        assert runner.step("Done.").done
    runner.close()
    return runner


@pytest.mark.slow
def test_a_row_says_how_its_folder_is_prepared_and_graded(place: Path) -> None:
    add = "awk '{ s += $1 } END { print s }' numbers > sum"
    for commands, max_turns, reward in (
        ([], 8, 0.0),
        ([add], 8, 1.0),
        (["cat numbers", add], 2, 1.0),
        ([add, "rm sum"], 2, 0.0),
    ):
        record = played(ROW, *commands, max_turns=max_turns).record
        assert record.error is None and record.reward == reward
        assert record.turns == min(len(commands) + 1, max_turns)


def test_the_model_cannot_pass_a_check_from_outside(place: Path) -> None:
    check = "python3 -c 'import json; raise SystemExit(json.loads(open(\"sum\").read()) != 55)'"
    plant = "echo 'loads = lambda text: 55' > json.py; echo 1 > sum; mkdir -p .local; cp json.py .local"
    assert played({"check": check}, plant).record.reward == 0.0
    # Older ones import from there.
    check = "python3 -c 'import sys; raise SystemExit(sys.version_info < (3, 11))'"
    check += f' && test "$(command -v python3)" = {sys.base_prefix}/bin/python3'
    assert played({"check": check}).record.reward == 1.0


def test_what_a_row_gets_wrong_is_an_error(place: Path) -> None:
    record = played({"setup": "echo no; exit 4", "check": "true"}).record
    assert record.error is not None and "setup of row/1 ended with status 4: no" in record.error
    for columns in ({}, {"check": 3}, {"check": " \n"}, {"check": "true", "setup": ["ls"]}):
        with pytest.raises(
            DataError, match=r"the column '(check|setup)' of row/1 is .*; write a command line"
        ):
            check_row(example(**columns))


def test_a_run_without_the_tool_or_without_checks_is_refused(tiny_model_dir: Path) -> None:
    cfg = Config()
    cfg.env.environment = "shell"
    with pytest.raises(ConfigError, match=r"env.environment=shell.* env.tools=\[shell\] beside it"):
        check_data(cfg)
    cfg.env.tools = ["shell"]
    check_data(cfg)
    for limit_s in ("abc", None, 0, -1, float("nan"), float("inf"), 1e300):
        cfg.env.environment_args = {"limit_s": limit_s}
        with pytest.raises(ConfigError, match=r"env\.environment_args\.limit_s=.*; write .*\{limit_s: 60\}"):
            check_environment(cfg)
    cfg.env.environment_args = {"limit_s": 2}
    check_environment(cfg)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    with pytest.raises(DataError, match="the column 'check' of row/1"):
        with_prompts(cfg, Problems([example(check="true")], [example()]), tokenizer)


@pytest.mark.slow
def test_a_check_that_takes_too_long_has_failed(place: Path) -> None:
    task = ShellTask(limit_s=1.0)
    task.reset(example(check="sleep 1000"))
    assert task.step("Done.").reward == 0.0
    close(task.folder)


def test_a_check_that_was_not_run_is_an_error(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It waits for memory, and the limit begins afterwards.
    waits: list[float | None] = []

    def wait_for(has_room: object, timeout: float | None) -> bool:
        waits.append(timeout)
        return True

    monkeypatch.setattr(python_tool.memory._changed, "wait_for", wait_for)
    assert played({"setup": "true", "check": "true"}).record.reward == 1.0
    assert waits == [None, None]
    nothing = tmp_path / "nothing.py"
    nothing.touch()
    monkeypatch.setattr(shell_tool, "_PROGRAM", nothing)
    record = played({"check": "true"}).record
    assert record.error is not None and "the process that ran the command has ended" in record.error


def test_no_command_runs_in_a_closed_folder(folder: ShellFolder, place: Path) -> None:
    close(folder)
    with pytest.raises(NotRun, match="the episode has ended"):
        run(folder, "echo back > file")
    assert list(place.iterdir()) == []


def test_a_command_ends_before_its_folder_is_removed(place: Path) -> None:
    folder = ShellFolder()
    results: list[str] = []
    thread = threading.Thread(
        target=lambda: results.append(run(folder, "touch started; while ! test -e go; do :; done; cat go"))
    )
    thread.start()
    while not list(place.glob("*/started")):
        assert thread.is_alive(), "the command did not start"
        os.sched_yield()
    (path,) = place.iterdir()
    folder.close()
    (path / "go").write_text("gone on")
    thread.join(60)
    close(folder)
    assert results == ["gone on"] and list(place.iterdir()) == []
