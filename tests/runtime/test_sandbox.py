"""A restricted process, as code that judges what a model wrote runs in it."""

from __future__ import annotations

import os
import subprocess
import sys

# What a process without a folder can and cannot do. Only what works is printed.
_JUDGE = """
import ctypes, os, signal, socket, threading, time
from torchrl_grpo.runtime import sandbox
sandbox.limit(2**30, 60)
parent = os.getpid()
child = os.fork()
if child == 0:
    sandbox.restrict(None, parent)
    def thread(): threading.Thread(target=print).start()
    for name, do in {
        "read the library": lambda: open(os.__file__).read(),
        "import from it": lambda: __import__("fractions").Fraction(1, 3),
        "read another file": lambda: open("/etc/passwd").read(),
        "write a file": lambda: open("file", "w"),
        "make a folder": lambda: os.mkdir("folder"),
        "write without creating": lambda: open(os.__file__, "a"),
        "start a process": os.fork,
        "start a thread": thread,
        "open a socket": socket.socket,
        "open a pair of sockets": socket.socketpair,
        "end its parent": lambda: os.kill(parent, signal.SIGKILL),
        "use much memory": lambda: bytes(2**31),
        "outlive its parent": lambda: ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) and 1 / 0,
    }.items():
        try:
            do()
        except (OSError, RuntimeError, MemoryError, ZeroDivisionError):
            continue
        print(name, flush=True)
    os._exit(0)
os.waitpid(child, 0)
child = os.fork()
if child == 0:
    # The parent is another process than the one that is named, as if that had died.
    sandbox.restrict(None, parent + 1)
    os._exit(0)
print("ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_restricted_process_without_a_folder_reads_the_library_and_computes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _JUDGE], capture_output=True, text=True, cwd=os.sep, check=True
    )
    assert done.stdout.splitlines() == ["read the library", "import from it", "ended 1"]
