"""Program of the ``shell`` tool: it runs a command line in a folder that exists, and watches its processes.

    python -I shell_sandbox.py PARENT FOLDER END SECONDS BYTES < COMMAND

It restricts and ends the command as ``python_sandbox.py`` does, but the command may start programs of the
system. Each of them may address ``BYTES`` of memory, and all together may occupy as much. They stay in one
process group, which ends with the shell. The output is a line ``done`` with the exit status and what the
command printed, or a line ``failed`` and the reason. The folder is left to the caller.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import resource
import signal
import socket
import stat
import sys
import time

# -I leaves this project out of the path, and the code does not need it.
sys.path.insert(0, os.path.abspath(f"{__file__}/../../../../.."))
from torchrl_grpo.envs.episodes.tools import scratch_folder
from torchrl_grpo.envs.episodes.tools.python_sandbox import (
    LARGE_FILE,
    LARGE_FILES,
    SMALL_FILE,
    Ended,
    Watch,
    give_result,
)
from torchrl_grpo.runtime import sandbox, seccomp
from torchrl_grpo.runtime.seccomp import AT_FDCWD, Question

del sys.path[0]

# Processes and threads at a time, and files and folders in the folder.
_MOST_TASKS, _MOST_FILES, _MOST_FOLDERS = 32, 1000, 100
# Bytes in the folder. A call may fill what earlier ones have left.
_MOST_BYTES = 2**26
# No event tells how much memory is in use.
_MEMORY_CHECK_S = 0.1
_LONGEST_PATH = 4096
# Bash would otherwise read its settings in /etc if it takes the input for a connection of a network.
_SHELLS = (("/bin/bash", "--norc"), ("/bin/sh",))
_PR_SET_CHILD_SUBREAPER = 36


def main(parent: int, folder: str, end: float, limit_s: float, max_bytes: int) -> None:
    """Run the command on the standard input."""
    parent_ended = os.pidfd_open(parent)
    if os.getppid() != parent:
        return
    os.umask(0o077)
    # Processes whose parent has ended become children of this one, which waits for their end.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    command = sys.stdin.buffer.read()
    folder = os.path.realpath(folder)
    used = scratch_folder.measure(folder)
    watcher, (own, other), (reads, writes) = os.getpid(), socket.socketpair(), os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(writes, 1)
        os.dup2(writes, 2)
        run(command, folder, other, watcher, math.ceil(limit_s) + 1, max_bytes)
        return
    # The child has run a program already if this comes too late.
    with contextlib.suppress(PermissionError):
        os.setpgid(child, child)
    os.close(writes)
    other.close()
    watch = ShellWatch(child, parent_ended, reads, own, folder, used, max_bytes)
    try:
        status, text = "done", watch.wait(end, limit_s)
    except Ended as error:
        status, text = "failed", str(error).encode()
    finally:
        # It is a zombie at least, so this is the right group.
        os.killpg(child, signal.SIGKILL)
        _, code_status = os.waitpid(child, 0)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
    if status == "done":
        status = f"done {os.waitstatus_to_exitcode(code_status)}"
    give_result(status, text)


def run(
    command: bytes, folder: str, channel: socket.socket, watcher: int, seconds: int, max_bytes: int
) -> None:
    """Restrict this process and run the command."""
    # Where memory runs out, the system ends the command first. Not every container has this file.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    os.chdir(folder)
    sandbox.limit(max_bytes, seconds, LARGE_FILE)
    # Python ignores it, and programs would ignore it too.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    shell = next(words for words in _SHELLS if os.path.exists(words[0]))
    try:
        socket.send_fds(channel, [b"-"], [sandbox.ask_about_new(of_shell=True)])
        os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        sandbox.restrict(folder, watcher, of_shell=True)
    except sandbox.Unavailable as error:
        sys.exit(f"the command was not run: {error}")
    os.execv(shell[0], [*shell, "-c", command])


class ShellWatch(Watch):
    """Watches the processes of a command, and decides what they may create, signal and change.

    Args:
        child: number of the shell, which leads their group.
        parent_ended: as for :class:`Watch`.
        reads: as for :class:`Watch`.
        channel: as for :class:`Watch`.
        folder: path of the folder, without links.
        used: number of files, number of folders and bytes in it.
        max_bytes: memory that all processes together may occupy.
    """

    longest_wait_s = _MEMORY_CHECK_S

    def __init__(
        self,
        child: int,
        parent_ended: int,
        reads: int,
        channel: socket.socket,
        folder: str,
        used: tuple[int, int, int],
        max_bytes: int,
    ) -> None:
        super().__init__(child, parent_ended, reads, channel)
        self._folder, self._max_bytes, self._next_check = folder, max_bytes, 0.0
        files, folders, size = used
        # Half of the room is for the first files, which may be large, and half for the others.
        room = max(0, _MOST_BYTES - size) // 2
        self._large = min(LARGE_FILES, room // LARGE_FILE)
        self._left = {
            "file": min(_MOST_FILES - files, self._large + room // SMALL_FILE),
            "folder": _MOST_FOLDERS - folders,
        }

    def is_over(self, descriptor: int, event: int) -> bool:
        """See :meth:`Watch.is_over`. What the shell leaves behind ends with it, and so does the output."""
        if descriptor == self.ended:
            os.killpg(self.child, signal.SIGKILL)
        return super().is_over(descriptor, event)

    def check(self) -> None:
        """Compare the memory of all processes with the limit.

        Raises:
            Ended: it is more.
        """
        if time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + _MEMORY_CHECK_S
        pages = 0
        for process in self._processes():
            with contextlib.suppress(OSError), open(f"/proc/{process}/statm") as file:
                pages += int(file.read().split()[1])
        if pages * resource.getpagesize() > self._max_bytes:
            raise Ended(f"the code used more than {self._max_bytes >> 20} MiB of memory and was ended")

    def decide(self, question: Question) -> None:
        """Answer a question."""
        if question.opens and self._give_null(question):
            return
        error = 0
        if question.kind == "thread":
            tasks = 0
            for process in self._processes():
                if process != self.child:
                    # Reaps a zombie whose parent has ended. For the others, which are no children, it fails.
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(process, os.WNOHANG)
                with contextlib.suppress(OSError):
                    tasks += len(os.listdir(f"/proc/{process}/task"))
            error = errno.EAGAIN if tasks >= _MOST_TASKS else 0
        elif question.kind in self._left:
            self._left[question.kind] -= 1
            error = errno.ENOSPC if self._left[question.kind] < 0 else 0
        is_done = question.kind in ("signal", "mode")
        try:
            if question.kind == "file":
                self._large -= 1
                if self._large < 0:
                    resource.prlimit(question.process, resource.RLIMIT_FSIZE, (SMALL_FILE, SMALL_FILE))
            elif question.kind == "signal":
                self._send_signal(_signed(question.arguments[0]), question.arguments[1])
            elif question.kind == "mode":
                self._change_mode(question)
        except OSError as failure:
            error = failure.errno or errno.EPERM
        except (OverflowError, ValueError):
            # The arguments of a call can be any numbers.
            error = errno.EFAULT
        self.answer(question, error, is_done=is_done)

    def _give_null(self, question: Question) -> bool:
        """Open the file without content for a process. It is not in the folder, and commands open it often.

        Returns:
            False if another file is meant, or the process has to open it itself and get its error.
        """
        flags = _signed(question.arguments[2])
        with contextlib.suppress(OSError, OverflowError):
            if _text_at(question.process, question.arguments[1]) == os.devnull:
                file = os.open(os.devnull, flags)
                try:
                    is_inherited = not flags & os.O_CLOEXEC
                    seccomp.give(self._listener, question.number, file, is_inherited=is_inherited)
                finally:
                    os.close(file)
                return True
        return False

    def _processes(self) -> list[int]:
        """Return the numbers of the processes of the command."""
        processes = []
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if name.isdigit() and os.getpgid(int(name)) == self.child:
                    processes.append(int(name))
        return processes

    def _send_signal(self, target: int, number: int) -> None:
        """Send a signal to a process of the command.

        Raises:
            OSError: the process is another's, or a group is meant. Programs such as ``timeout`` count on one
                of their own, and none can have that.
        """
        if not 0 <= number <= signal.SIGRTMAX:
            raise OSError(errno.EINVAL, "signal")
        if target <= 0:
            raise PermissionError(errno.EPERM, "signal")
        process = os.pidfd_open(target)
        try:
            # Afterwards, because the number may become another's.
            if os.getpgid(target) != self.child:
                raise PermissionError(errno.EPERM, "signal")
            signal.pidfd_send_signal(process, number)
        finally:
            os.close(process)

    def _change_mode(self, question: Question) -> None:
        """Change the rights of a file of the folder.

        Raises:
            OSError: it is elsewhere, or behind a link.
        """
        where, pointer, mode = question.arguments[:3]
        place = "cwd" if where & 0xFFFFFFFF == AT_FDCWD else os.path.join("fd", str(_signed(where)))
        path = os.readlink(f"/proc/{question.process}/{place}")
        if pointer:
            path = os.path.join(path, _text_at(question.process, pointer))
        relative = os.path.relpath(path, self._folder)
        names = [name for name in relative.split("/") if name != "."]
        if ".." in names:
            raise PermissionError(errno.EPERM, "mode")
        opened = os.open(self._folder, os.O_PATH | os.O_DIRECTORY)
        try:
            for name in names:
                inner = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=opened)
                os.close(opened)
                opened = inner
            kind = os.fstat(opened).st_mode
            if stat.S_ISLNK(kind):
                raise PermissionError(errno.EPERM, "mode")
            # A folder stays one that can be read.
            os.chmod(f"/proc/self/fd/{opened}", mode & 0o777 | (0o700 if stat.S_ISDIR(kind) else 0))
        finally:
            os.close(opened)


def _signed(number: int) -> int:
    return ctypes.c_int32(number & 0xFFFFFFFF).value


def _text_at(process: int, place: int) -> str:
    """Return a text in the memory of a process."""
    text = b""
    with open(f"/proc/{process}/mem", "rb", buffering=0) as memory:
        memory.seek(place)
        while b"\0" not in text and len(text) < _LONGEST_PATH:
            # Up to the end of a page, because the next one may be missing.
            chunk = memory.read(256 - (place + len(text)) % 256)
            if not chunk:
                break
            text += chunk
    return os.fsdecode(text.partition(b"\0")[0])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
