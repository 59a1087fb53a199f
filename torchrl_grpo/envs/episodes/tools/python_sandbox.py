"""Program of the ``python`` tool: it runs code in a process of its own, watches it, and removes its files.

    python -I python_sandbox.py PARENT PLACE END SECONDS BYTES < CODE

It ends the code at the time ``END`` of the monotonic clock, ``SECONDS`` after the call, and when the process
``PARENT`` ends or the code takes more than it may have. The code can read Python's library, and has an empty
folder in ``PLACE`` and ``BYTES`` of memory. The output is a line ``done`` and what the code printed, or a
line ``failed`` and the reason. Where the kernel cannot restrict the code, it is not run.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback

# -I leaves this project out of the path, and the code does not need it.
sys.path.insert(0, os.path.abspath(f"{__file__}/../../../../.."))
from torchrl_grpo.envs.episodes.tools import scratch_folder
from torchrl_grpo.runtime import sandbox, seccomp

del sys.path[0]

# Output after this is not read, and the code is ended.
_MAX_OUTPUT = 2**16
# Threads, files and folders that the code may create. Deleted files count too, because it may still use them.
# A disk takes 3 ms to remove a folder.
_MOST = {"thread": 32, "file": 1000, "folder": 100}
# The first files may be large and the others are small, so all together have at most 64 MiB.
LARGE_FILES, LARGE_FILE, SMALL_FILE = 32, 2**20, 2**15


class Ended(Exception):
    """The code was ended. The message says why, for the model."""


def main(parent: int, place: str, end: float, limit_s: float, max_bytes: int) -> None:
    """Run the code on the standard input."""
    parent_ended = os.pidfd_open(parent)
    if os.getppid() != parent:
        return
    os.umask(0o077)
    code = sys.stdin.buffer.read().decode(errors="replace")
    try:
        folder, lock = scratch_folder.create(place)
    except OSError as error:
        give_result("failed", f"there is no folder for the code: {error}".encode())
        return
    watcher, (own, other), (reads, writes) = os.getpid(), socket.socketpair(), os.pipe()
    try:
        child = os.fork()
    except OSError as error:
        give_result("failed", f"there is no process for the code: {error}".encode())
        scratch_folder.remove(folder, lock)
        return
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(writes, 1)
        os.dup2(writes, 2)
        run(code, folder, other, watcher, math.ceil(limit_s) + 1, max_bytes)
        return
    os.close(writes)
    other.close()
    try:
        status, text = "done", Watch(child, parent_ended, reads, own).wait(end, limit_s)
    except Ended as error:
        status, text = "failed", str(error).encode()
    finally:
        # It is a zombie at least, so this is the right process.
        os.kill(child, signal.SIGKILL)
        _, code_status = os.waitpid(child, 0)
    if status == "done" and os.WIFSIGNALED(code_status):
        name = signal.Signals(os.WTERMSIG(code_status)).name
        text = text.rstrip() + f"\nthe code was ended by {name}".encode()
    # The folder comes later, because its removal may take long.
    give_result(status, text)
    scratch_folder.remove(folder, lock)


def give_result(status: str, text: bytes) -> None:
    """Write the output, which then has ended."""
    # The parent may not read any more.
    with contextlib.suppress(BrokenPipeError):
        os.write(1, f"{status}\n".encode() + text)
    os.close(1)


def run(code: str, folder: str, channel: socket.socket, parent: int, seconds: int, max_bytes: int) -> None:
    """Restrict this process and run the code."""
    # A machine without memory ends the code first. Not every container has this file.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    sys.dont_write_bytecode = True
    os.chdir(folder)
    os.environ["HOME"] = os.environ["TMPDIR"] = folder
    sandbox.limit(max_bytes, seconds, LARGE_FILE)
    try:
        socket.send_fds(channel, [b"-"], [sandbox.ask_about_new()])
        os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        sandbox.restrict(folder, parent)
    except sandbox.Unavailable as error:
        sys.exit(f"the code was not run: {error}")
    try:
        exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
    except Exception as error:  # noqa: BLE001  it is shown
        # Without the lines of this program.
        assert error.__traceback__ is not None
        traceback.print_exception(error.with_traceback(error.__traceback__.tb_next))
        sys.exit(1)


class Watch:
    """Watches the process of the code: its end, its output, and the files and threads that it makes.

    Args:
        child: number of the process.
        parent_ended: file descriptor of the process whose end ends the code.
        reads: file descriptor with the output.
        channel: socket on which the file descriptor for questions arrives.

    Attributes:
        child: number of the process.
        ended: file descriptor that tells its end.
    """

    # Seconds after which check() is called, if there is no event.
    longest_wait_s = 3600.0

    def __init__(self, child: int, parent_ended: int, reads: int, channel: socket.socket) -> None:
        self.child, self._reads, self._channel = child, reads, channel
        self.ended, self._parent_ended, self._listener = os.pidfd_open(child), parent_ended, -1
        self._poll = select.poll()
        for descriptor in (self.ended, parent_ended, reads, channel.fileno()):
            self._poll.register(descriptor, select.POLLIN)
        self._created = dict.fromkeys(_MOST, 0)
        self._output = b""

    def wait(self, end: float, limit_s: float) -> bytes:
        """Return the output of the code when its process has ended.

        Args:
            end: time of the monotonic clock at which the code is ended.
            limit_s: seconds that the message names.

        Raises:
            Ended: the code may not go on.
        """
        waiting = {self.ended, self._reads}
        while waiting:
            left = end - time.monotonic()
            if left <= 0:
                raise Ended(f"the code took longer than {limit_s:g} s and was ended")
            for descriptor, event in self._poll.poll(1000 * min(left, self.longest_wait_s)):
                if self.is_over(descriptor, event):
                    self._poll.unregister(descriptor)
                    waiting.discard(descriptor)
            self.check()
        return self._output

    def check(self) -> None:
        """Look at what no event tells."""

    def is_over(self, descriptor: int, event: int) -> bool:
        """Take what a file descriptor has, and say whether it was the last."""
        if descriptor == self._parent_ended:
            raise Ended("the run has ended")
        if descriptor == self.ended:
            return True
        if descriptor == self._channel.fileno():
            # A process that could not be restricted sends none.
            for listener in socket.recv_fds(self._channel, 1, 1)[1]:
                self._listener = listener
                self._poll.register(listener, select.POLLIN)
            return True
        if descriptor == self._listener:
            if not event & select.POLLIN:
                return True
            question = seccomp.receive(self._listener)
            if question is not None:
                self.decide(question)
            return False
        chunk = os.read(self._reads, 65_536)
        self._output += chunk
        if len(self._output) > _MAX_OUTPUT:
            raise Ended(f"the code printed more than {_MAX_OUTPUT} bytes and was ended")
        return not chunk

    def decide(self, question: seccomp.Question) -> None:
        """Let a call go on, if the code may have one more thread or file."""
        kind = question.kind
        self._created[kind] += 1
        error = 0
        if self._created[kind] > _MOST[kind]:
            if kind != "thread":
                raise Ended(f"the code made more than {_MOST[kind]} {kind}s and was ended")
            error = errno.EAGAIN
        if self._created["file"] == LARGE_FILES + 1:
            resource.prlimit(self.child, resource.RLIMIT_FSIZE, (SMALL_FILE, SMALL_FILE))
        self.answer(question, error)

    def answer(self, question: seccomp.Question, error: int = 0, *, is_done: bool = False) -> None:
        """See :func:`.seccomp.answer`."""
        seccomp.answer(self._listener, question.number, error, is_done=is_done)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
