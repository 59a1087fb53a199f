"""Run a module in a process of its own that ends with everything it has started, and with this process.

    python -P -m torchrl_grpo.runtime.supervised PARENT SOCKET MODULE [ARGUMENT ...] < PIPE

The module may run code of the user. That code may start processes, also in sessions of their own, which would
outlive it and keep memory, files and ports. So a small process, the supervisor, is between this one and the
module's. It runs nothing else, and on Linux it becomes the parent of every process that the module leaves
behind. When the module's process ends, when the parent closes ``PIPE`` or sends SIGTERM, or when the parent
is gone however it ended, the supervisor kills all of them, and ends with the exit code of the module's
process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from torchrl_grpo.runtime import own_variables

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# Seconds that a supervisor has to end everything. It needs milliseconds.
_END_LIMIT_S = 0.4


def _visible(gpu: int) -> str:
    """Return the name of a GPU of this process, for a process that sees only this one; empty for none."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else None
    if names is None:
        return str(gpu)
    return names[gpu] if gpu < len(names) else ""


class SupervisedProcess:
    """A module in a process of its own.

    Args:
        module: name of the module, which is run as ``python -m`` does. Its first argument is the file
            descriptor of a socket to this process.
        arguments: further arguments.
        environment: environment variables; None for those of this process, without its own settings
            (:mod:`~torchrl_grpo.runtime.own_variables`).
        gpu: number of the only GPU that the process sees, among those of this one; None for none.

    Attributes:
        socket: this end of the socket.
        process: the supervisor. The module's process leads a group of its own.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        gpu: int | None = None,
    ) -> None:
        self.socket, theirs = socket.socketpair()
        # The process must be able to import everything that this one can. -P keeps the working directory out
        # of the module search path, unless it is on this one's.
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        command = [sys.executable, "-P", "-W", "ignore", "-m", __name__, str(os.getpid())]
        with theirs:
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno()), module, *arguments],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                env={
                    **(own_variables.inherited() if environment is None else environment),
                    "PYTHONPATH": path,
                    "CUDA_VISIBLE_DEVICES": "" if gpu is None else _visible(gpu),
                    "OMP_NUM_THREADS": "1",
                },
                start_new_session=True,  # only the parent handles Ctrl-C
            )

    def begin_to_end(self) -> None:
        """Let the supervisor end the process and everything that it has started. This does not wait."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        if self.process.poll() is None:
            # A process that this one has forked may keep the pipe open. Somebody may have stopped it.
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGCONT)

    def end(self) -> int | None:
        """End the process and everything that it has started. It may be called twice.

        Returns:
            The exit code of the module's process; for a signal, 128 plus its number. None if the
            supervisor is still at it, for example because much memory takes long to be freed.
        """
        self.begin_to_end()
        try:
            return self.process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            return None


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends.

    The parent must have one thread: the kernel acts when the thread ends that has started this process.
    """
    parent = os.getppid()
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of the processes that children of this one leave behind, where the kernel can."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def own_children() -> set[int]:
    """Return the process ids of this process's children, orphans included; empty if unknown."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return {int(number) for number in file.read().split()}
    except OSError:
        return set()


def main(parent: int, number: int, module: str, arguments: Sequence[str]) -> None:
    """Start the module in a child process and supervise it. Only the child returns, when the module has run.

    Args:
        parent: process id of the parent.
        number: file descriptor of the module's socket.
        module: name of the module.
        arguments: its further arguments.
    """
    adopt_orphans()
    # What the module prints goes to the log of the run.
    os.dup2(2, 1)
    wake, wakes = _wake_on_signals()
    child = os.fork()
    if child:
        os.close(number)
        # At once: while Python takes itself apart, SIGTERM has no handler.
        os._exit(_supervise(child, parent, wake))
    die_with_parent()
    # A signal to its group must not reach the supervisor.
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    for signal_number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_DFL)
    os.close(wake)
    os.close(wakes)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.stdout = sys.stderr
    os.set_inheritable(number, False)
    sys.argv = [module, str(number), *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _wake_on_signals() -> tuple[int, int]:
    """Return the ends, to read and to write, of a pipe that gets the number of each SIGCHLD and SIGTERM."""
    wake, wakes = os.pipe()
    for end in (wake, wakes):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakes)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    return wake, wakes


def _supervise(child: int, parent: int, wake: int) -> int:
    status: int | None = None
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        # A process that the parent has forked may keep the other end of the pipe open.
        with contextlib.suppress(OSError, AttributeError):
            selector.register(os.pidfd_open(parent), selectors.EVENT_READ)
        selector.register(wake, selectors.EVENT_READ)
        while status is None and os.getppid() == parent:
            ready = {key.fd for key, _ in selector.select()}
            signals = b""
            with contextlib.suppress(BlockingIOError):
                signals = os.read(wake, 4_096)
            status = _reap(child)
            if ready != {wake} or signal.SIGTERM in signals:
                break
    while True:
        for process in own_children() | ({child} if status is None else set()):
            # A process that has become another user's is not this one's to end.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        try:
            # What a child leaves behind is a child of this process when it has ended.
            ended, ended_status = os.waitpid(-1, 0)
        except ChildProcessError:
            break
        status = ended_status if ended == child else status
    code = os.waitstatus_to_exitcode(status or 0)
    return code if code >= 0 else 128 - code


def _reap(child: int) -> int | None:
    """Reap the children that have ended, and return the status of ``child`` if it is among them."""
    child_status = None
    with contextlib.suppress(ChildProcessError):
        while True:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                break
            child_status = status if process == child else child_status
    return child_status


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
