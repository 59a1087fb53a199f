"""A server as a child of this process."""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import subprocess
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path

from torchrl_grpo.config.checks.engine import with_keys
from torchrl_grpo.errors import ModelError
from torchrl_grpo.inference.servers.kinds import ServerKind
from torchrl_grpo.inference.servers.launch import Launch
from torchrl_grpo.inference.servers.lifetime import END_VARIABLE, READY_VARIABLE
from torchrl_grpo.runtime.files.shared_files import Folder, open_regular, remove_abandoned
from torchrl_grpo.runtime.files.socket_folder import socket_parent
from torchrl_grpo.runtime.own_variables import inherited
from torchrl_grpo.runtime.shared_memory import segments_of, unlink

_PREFIX = "grpo-server-"
# Longest rest of a socket's path in bytes: the name of the server's folder, and that of a socket of vLLM.
_SOCKET_ROOM = len(f"/{_PREFIX}12345678") + len(f"/{uuid.UUID(int=0)}")
# Number of lines of a server's log in an error message.
_LAST_LINES = 2


class ServerProcess:
    """A server that listens on a socket in a folder of its own, which only this user can open.

    Args:
        kind: kind of the server.
        launch: how it is started.
        environment: further environment variables.
        log: file that its output is appended to; None for this process's own output.
    """

    def __init__(
        self,
        kind: ServerKind,
        launch: Launch,
        *,
        environment: Mapping[str, str],
        log: Path | None,
    ) -> None:
        self._kind = kind
        self.key = secrets.token_urlsafe(32)
        self._log = log
        self._ending = threading.Lock()
        self._ended = False
        # Segments of shared memory, noted in case somebody else kills the server.
        self._segments: set[str] = set()
        temporary = socket_parent(_SOCKET_ROOM)
        # Those of runs that were killed.
        remove_abandoned(temporary, _PREFIX)
        self._folder = Folder(temporary, _PREFIX)
        self.address = f"unix:{self._folder.path}/socket"
        read, write = os.pipe()
        # Closed with this object and not by kill(), which may run while another thread waits for it.
        self._ready = os.fdopen(read, "rb", buffering=0)
        appending = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        output = None if log is None else os.fdopen(open_regular(log, appending), "ab")
        try:
            self._process = subprocess.Popen(
                launch.command({"uds": str(self._folder.path / "socket")}),
                env={
                    **inherited(),
                    **launch.variables,
                    **environment,
                    kind.engine.api_key_variable: self.key,
                    # A killed server leaves its own sockets and temporary files behind.
                    **dict.fromkeys(launch.folder_variables, str(self._folder.path)),
                    READY_VARIABLE: str(write),
                    END_VARIABLE: "1",
                },
                # Never written to: its end tells the server that this process has ended.
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=[write],
                # A group of its own, so that its children end with it, and an interrupt does not reach it.
                start_new_session=True,
            )
        finally:
            os.close(write)
            if output is not None:
                output.close()

    @property
    def pid(self) -> int:
        """Number of the server's first process."""
        return self._process.pid

    def wait_until_ready(self, timeout_s: float) -> None:
        """Block until the server is set up. It listens a moment later.

        Raises:
            ModelError: it ended.
            TimeoutError: it is not ready in time.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._ready, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise TimeoutError(
                    f"a server of {self._kind.engine.program} was not ready within {timeout_s:g} s"
                    f"{self._said()}"
                )
        if not self._ready.read(1):
            # The exit status stays, so that the number of the process is not used again before kill().
            left = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            code = "nothing" if left is None else left.si_status
            raise ModelError(
                f"inference_model.backend={self._kind.engine.name}: a server ended with code {code} while it "
                f"started{self._said()}"
            )
        self._segments = segments_of(self._process.pid)

    def _said(self) -> str:
        if self._log is None:
            return "; its messages are above"
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()]
        last = " | ".join((errors or lines)[-_LAST_LINES:])
        return f"; the last of {self._log}: {with_keys(last)}"

    def terminate(self) -> None:
        """Ask the server to end in good order; :meth:`kill` waits for it."""
        with self._ending:
            if not self._ended:
                self._signal(signal.SIGTERM)

    def kill(self, patience_s: float = 0.0) -> None:
        """End the server and its children.

        Args:
            patience_s: seconds to wait for a server that was asked to end.
        """
        with self._ending:
            if self._ended:
                return
            self._ended = True
            if patience_s:
                self._wait_without_reaping(patience_s)
            segments = self._segments | segments_of(self._process.pid)
            self._signal(signal.SIGKILL)
            self._process.wait()
            unlink(segments)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._folder.close()

    def _wait_without_reaping(self, seconds: float) -> None:
        descriptor = os.pidfd_open(self._process.pid)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(descriptor, selectors.EVENT_READ)
                selector.select(seconds)
        finally:
            os.close(descriptor)

    def _signal(self, number: int) -> None:
        # The first process was not waited for, so its number and that of the group are still its own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
