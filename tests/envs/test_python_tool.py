"""The python tool: what code of a model may do, what it may take, and that nothing of it is left."""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from torchrl_grpo.envs.episodes.tools import python_tool, scratch_folder
from torchrl_grpo.envs.episodes.tools.python_tool import CodeFailed, run_python

# Runs code, and prints the results and what is left.
_CALLER = """
import json, os, sys, tempfile, threading
from torchrl_grpo.envs.episodes.tools.python_tool import CodeFailed, run_python
results = {}
for name, code in json.load(sys.stdin).items():
    try:
        results[name] = run_python(code, 20.0)
    except (CodeFailed, OSError) as error:
        results[name] = f"{type(error).__name__}: {error}"
with open(f"/proc/self/task/{os.getpid()}/children") as children:
    left = children.read().split() + os.listdir(tempfile.gettempdir())
print(json.dumps([results, left, threading.active_count()]))
"""
# Calls the tool, and is killed meanwhile.
_KILLED = """
import sys
from torchrl_grpo.envs.episodes.tools.python_tool import run_python
run_python(sys.argv[1], 100.0)
"""


def as_ordinary_user() -> None:
    """Give up what root may do, such as read a folder without the right to."""
    ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())


def call(
    codes: dict[str, str], folder: Path, before: Callable[[], None] | None = None
) -> tuple[dict[str, str], list[str], int]:
    """Run code in the tool of another process.

    Args:
        codes: code by name.
        folder: folder for temporary files.
        before: function that the process runs first.

    Returns:
        Results by name, processes and files that are left, and the number of threads.
    """
    done = subprocess.run(
        [sys.executable, "-c", _CALLER],
        input=json.dumps(codes),
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
        preexec_fn=before,
        check=True,
    )
    results, left, threads = json.loads(done.stdout)
    return results, left, threads


def start(code: str, folder: Path) -> tuple[subprocess.Popen[str], int, int]:
    """Start a process that runs code in the tool.

    Returns:
        The process, and the numbers of the one that watches the code and of the code's.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", _KILLED, code], env={**os.environ, "TMPDIR": str(folder)}, text=True
    )
    end = time.monotonic() + 60
    while not list(folder.glob("grpo-python-*/started")):
        assert time.monotonic() < end and process.poll() is None, "the code did not start"
        os.sched_yield()
    (watcher,) = children(process.pid)
    (code_process,) = children(watcher)
    return process, watcher, code_process


def children(number: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{number}/task/{number}/children").read_text().split()]


def wait_for_end(*descriptors: int) -> None:
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], 60)[0], "a process of the code is left"
        os.close(descriptor)


def test_the_sandbox_works_on_this_machine() -> None:
    assert python_tool.why_unavailable() is None


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("import os; print(os.listdir('/'))", "PermissionError"),
        ("print(open('/etc/passwd').read())", "PermissionError"),
        ("import pathlib; print(list(pathlib.Path.home().parent.iterdir()))", "PermissionError"),
        ("open('/tmp/left-behind', 'w')", "PermissionError"),
        ("import os; os.symlink('/etc', 'here'); print(os.listdir('here'))", "PermissionError"),
        ("import socket; socket.create_connection(('127.0.0.1', 1))", "PermissionError"),
        ("import ctypes; print(ctypes.CDLL(None).syscall(41, 2, 1, 0))", "-1"),
        ("import os; os.fork()", "PermissionError"),
        ("import subprocess; subprocess.run(['ls'])", "PermissionError"),
        ("import os; os.execv('/bin/ls', ['ls'])", "PermissionError"),
        ("import os; os.kill(os.getppid(), 9)", "PermissionError"),
        (
            "import fcntl, os; r, w = os.pipe(); fcntl.fcntl(r, fcntl.F_SETOWN, os.getppid())",
            "PermissionError",
        ),
        ("import resource as r, os; r.prlimit(os.getppid(), r.RLIMIT_CPU, (1, 1))", "PermissionError"),
        ("import os; os.sched_setaffinity(os.getppid(), {0})", "PermissionError"),
        ("import os; os.chmod('/tmp', 0)", "PermissionError"),
        ("import os; os.utime('/tmp')", "PermissionError"),
        ("import os; os.truncate('/tmp/any', 0)", "PermissionError"),
        ("import os; os.open(os.__file__, os.O_RDONLY | os.O_TRUNC)", "PermissionError"),
        ("import ctypes; print(ctypes.CDLL(None).shmget(0, 4096, 0o1000))", "-1"),
        ("x = 'a' * 2**31", "MemoryError"),
        ("open('big', 'w').write('a' * 2**21)", "File too large"),
        ("def f(:", "SyntaxError"),
        ("raise ValueError('mine')", "ValueError: mine"),
    ],
)
def test_code_in_the_sandbox_gets_an_error(code: str, printed: str) -> None:
    assert printed in run_python(code, 20.0)


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("print(1 + 1)", "2"),
        ("import math, json, random, fractions; print(math.sqrt(16))", "4.0"),
        ("open('note', 'w').write('kept'); print(open('note').read())", "kept"),
        ("import threading; t = threading.Thread(target=print, args=('t',)); t.start(); t.join()", "t"),
        ("import asyncio; print(asyncio.run(asyncio.sleep(0, 'slept')))", "slept"),
        ("import asyncio; print(asyncio.run(asyncio.to_thread(abs, -3)))", "3"),
        ("import numpy; print(int((numpy.ones((99, 99)) @ numpy.ones((99, 99))).sum()))", "970299"),
        ("import os; os.fsync(os.open('f', os.O_CREAT | os.O_WRONLY)); print('written')", "written"),
        ("import tempfile; print(tempfile.TemporaryFile().write(b'four'))", "4"),
        ("import sys; print(sys.stdin.read() == '')", "True"),
        ("import sys; sys.exit('bye')", "bye"),
        ("def f():\n    return g()\ndef g():\n    return 7\nprint(f())", "7"),
    ],
)
def test_code_in_the_sandbox_works(code: str, printed: str) -> None:
    assert run_python(code, 20.0) == printed


@pytest.mark.slow
def test_endless_code_and_endless_output_end() -> None:
    with pytest.raises(CodeFailed, match=r"longer than 0\.5 s"):
        run_python("import time; time.sleep(100)", 0.5)
    with pytest.raises(CodeFailed, match=r"longer than 0\.5 s"):
        run_python("import os, time; os.close(1); os.close(2); time.sleep(100)", 0.5)
    with pytest.raises(CodeFailed, match="printed more than"):
        run_python("while True: print('x' * 1000)", 20.0)


# Calls that fail: they reach other processes, outlive the code, or take memory that no limit counts. Each is
# tried with arguments that would succeed.
_REFUSED = """
import ctypes, fcntl, os, resource, signal, socket
libc = ctypes.CDLL(None, use_errno=True)
def c(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(name)
library, (reads, writes) = open(os.__file__), os.pipe()
opened = os.open('opened', os.O_CREAT | os.O_RDWR)
for name, do in {
    "no longer die with the parent": lambda: c("prctl", 1, 0, 0, 0, 0),
    "leave the session": os.setsid,
    "leave the process group": lambda: os.setpgid(0, 0),
    "memory as a file": lambda: os.memfd_create("a"),
    "locked memory": lambda: c("mlockall", 1),
    "large pipes": lambda: fcntl.fcntl(writes, 1031, 2**20),
    "blocks behind the end of a file": lambda: c("fallocate", opened, 1, *map(ctypes.c_long, (0, 2**30))),
    "watched folders": lambda: c("inotify_init1", 0),
    "a lock of the library": lambda: fcntl.flock(library, fcntl.LOCK_EX),
    "a lease of the library": lambda: fcntl.fcntl(library, fcntl.F_SETLEASE, fcntl.F_RDLCK),
    "all disks": lambda: c("syncfs", library.fileno()),
    "other kinds of sockets": lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM),
    "files sent by a socket": lambda: socket.send_fds(socket.socketpair()[0], [b"-"], [0]),
    "a queue of messages": lambda: c("mq_open", b"/grpo-test", os.O_CREAT | os.O_RDWR, 0o600, None),
    "System V semaphores": lambda: c("semget", 0, 1, 0o1600),
    "a timer": lambda: c("timer_create", 0, None, ctypes.byref(ctypes.c_void_p())),
    "a lower priority": lambda: os.nice(1),
    "another schedule": lambda: os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0)),
    "links": lambda: os.symlink("a", "link"),
    "links to the library": lambda: os.link(os.__file__, "link"),
    "named pipes": lambda: os.mkfifo("fifo"),
    "stopping itself": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}.items():
    try:
        do()
    except OSError:
        continue
    print(name)
"""


def test_code_cannot_outlive_its_limits_or_reach_others() -> None:
    assert run_python(_REFUSED, 20.0) == ""


# Code that takes as much as it can, and what the tool says.
_GREEDY = {
    "nested folders": (
        "import os\nfor _ in range(1200): os.mkdir('d'); os.chdir('d')",
        "CodeFailed: the code made more than 100 folders and was ended",
    ),
    "folders that cannot be read": (
        "import os\nfor _ in range(40):\n os.mkdir('d', 0o300); os.chdir('d'); open('f', 'w').close()\n"
        "os.mkdir('none', 0); os.umask(0o777); os.mkdir('n' * 255); print('made')",
        "made",
    ),
    "files, some without a name": (
        "import os\nn = 0\n"
        "while True: open(str(n := n + 1), 'w').close(); os.close(os.open('.', os.O_TMPFILE | os.O_RDWR))",
        "CodeFailed: the code made more than 1000 files and was ended",
    ),
    "deleted files in use": (
        # A file that is mapped keeps its blocks after it was closed and deleted.
        "import ctypes, os\n"
        "libc, size, most = ctypes.CDLL(None), 0, 2**20\n"
        "for _ in range(200):\n"
        "    with open('f', 'wb+') as file:\n"
        "        try:\n"
        "            file.truncate(most)\n"
        "        except OSError:\n"
        "            most = 2**15\n"
        "            file.truncate(most)\n"
        "        libc.mmap(None, 4096, 1, 1, file.fileno(), 0)\n"
        "    os.unlink('f')\n"
        "    size += most\n"
        "print(size <= 2**26)",
        "True",
    ),
    "threads": (
        "import ctypes, threading, time\nctypes.CDLL(None).mallopt(-8, 1)\nthreading.stack_size(2**15)\n"
        "n = 0\ntry:\n"
        "    while True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start(); n += 1\n"
        "except RuntimeError as error: print(n, error)",
        "32 can't start new thread",
    ),
    "shared memory": (
        "import mmap\nkept = []\ntry:\n"
        "    while True: kept.append(mmap.mmap(-1, 2**26))\n"
        "except OSError: print(len(kept) < 16)",
        "True",
    ),
    "open files": (
        "import os\nn = 0\ntry:\n    while True: os.dup(0); n += 1\nexcept OSError: print(n < 64)",
        "True",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("before", [None, as_ordinary_user])
def test_what_code_takes_is_bounded_and_gone_afterwards(
    tmp_path: Path, before: Callable[[], None] | None
) -> None:
    codes = {name: code for name, (code, _) in _GREEDY.items()}
    results, left, threads = call(codes, tmp_path, before)
    assert results == {name: result for name, (_, result) in _GREEDY.items()}
    assert left == [] and threads == 1


def test_code_ends_with_the_run_and_its_folder_is_removed(tmp_path: Path) -> None:
    code = (
        "import ctypes, os, signal, time\n"
        "ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\n"
        "for number in range(1, 32):\n"
        "    if number not in (9, 19): signal.signal(number, signal.SIG_IGN)\n"
        "os.mkdir('started')\n"
        "time.sleep(1000)"
    )
    run, watcher, code_process = start(code, tmp_path)
    processes = [os.pidfd_open(number) for number in (watcher, code_process)]
    run.kill()
    run.wait()
    wait_for_end(*processes)
    assert list(tmp_path.iterdir()) == []


def test_the_next_run_removes_the_folder_of_a_killed_one_and_no_other(tmp_path: Path) -> None:
    run, watcher, code_process = start("import os, time; os.mkdir('started'); time.sleep(1000)", tmp_path)
    ended = os.pidfd_open(code_process)
    os.kill(watcher, signal.SIGKILL)
    wait_for_end(ended)
    assert run.wait(60) == 1
    (folder,) = tmp_path.iterdir()
    other = tmp_path / "other"
    other.mkdir()
    (other / "kept").touch()
    (folder / "link").symlink_to(other)
    (tmp_path / "grpo-python-link").symlink_to(other)
    os.mkfifo(tmp_path / "grpo-python-fifo")
    used, lock = scratch_folder.create(str(tmp_path))
    results, left, _ = call({"any": "print(1)"}, tmp_path)
    os.close(lock)
    assert results == {"any": "1"}
    assert sorted(left) == sorted(["other", "grpo-python-link", "grpo-python-fifo", Path(used).name])
    assert list(other.iterdir()) == [other / "kept"]


def test_a_deep_folder_is_removed_without_recursion_and_in_time(tmp_path: Path) -> None:
    path, lock = scratch_folder.create(str(tmp_path))
    # Its path is longer than any call takes.
    name, depth = "n" * 60, 100
    place = os.open(path, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=place)
        inner = os.open(name, os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = inner
    os.close(place)
    with pytest.raises(TimeoutError):
        scratch_folder.remove(path, lock, time.monotonic() - 1)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + depth // 2)
    try:
        scratch_folder.remove(path, lock)
    finally:
        sys.setrecursionlimit(limit)
    os.close(lock)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_folder_that_takes_long_to_remove_does_not_delay_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "end")
    program = tmp_path / "program.py"
    program.write_text(f"import os\nos.write(1, b'done\\n7')\nos.close(1)\nopen({str(tmp_path / 'end')!r})\n")
    monkeypatch.setattr(python_tool, "_PROGRAM", program)
    assert run_python("", 1.0) == "7"
    (process,) = python_tool._unfinished
    (tmp_path / "end").write_text("")
    assert process.wait(60) == 0


def test_code_in_parallel_waits_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 5.0
    monkeypatch.setattr(python_tool, "available_gib", lambda: free)
    memory = python_tool._Memory()
    now = time.monotonic()
    with memory.reserved(now, 1.0), memory.reserved(now, 1.0):
        with pytest.raises(CodeFailed, match="the memory was in use for 3 s"), memory.reserved(now, 3.0):
            pass
        free = 50.0
        with memory.reserved(now, 1.0):
            pass
    free = 0.1
    # One call is possible on every machine.
    with memory.reserved(now, 1.0):
        next_one = threading.Thread(target=lambda: memory.reserved(time.monotonic() + 60, 60.0).__enter__())
        next_one.start()
    next_one.join(60)
    assert not next_one.is_alive()
