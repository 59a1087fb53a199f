"""A vLLM server as a child of this process."""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrl_grpo.errors import ModelError
from torchrl_grpo.inference.servers.command import server_command, server_environment
from torchrl_grpo.inference.servers.program import END_VARIABLE, READY_VARIABLE

_LAST_LINES = 3


class ServerProcess:
    """A server that listens on a socket in a folder of its own, which only this user can open.

    Args:
        source: folder or hub name of the model.
        arguments: result of :func:`~torchrl_grpo.inference.vllm_arguments.vllm_arguments`.
        on_cpu: whether it computes on a CPU.
        environment: further environment variables.
        log: file that its output is appended to; None for this process's own output.
    """

    def __init__(
        self,
        source: str,
        arguments: Mapping[str, Any],
        *,
        on_cpu: bool,
        environment: Mapping[str, str],
        log: Path | None,
    ) -> None:
        self.key = secrets.token_urlsafe(32)
        self._log = log
        # Short, because the path of a socket has at most 107 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="grpo-server-"))
        self.address = f"unix:{self._folder}/socket"
        self._ready, ready = os.pipe()
        output = None if log is None else log.open("ab")
        try:
            self._process = subprocess.Popen(
                server_command(source, arguments, {"uds": str(self._folder / "socket")}),
                env={
                    **os.environ,
                    **server_environment(self.key, arguments["enforce_eager"], on_cpu),
                    **environment,
                    READY_VARIABLE: str(ready),
                    END_VARIABLE: "1",
                },
                # Never written to: its end tells the server that this process has ended.
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=[ready],
                # A group of its own, so that its children end with it, and an interrupt does not reach it.
                start_new_session=True,
            )
        finally:
            os.close(ready)
            if output is not None:
                output.close()

    def wait_until_ready(self, timeout_s: float) -> None:
        """Block until the server is set up. It listens a moment later.

        Raises:
            ModelError: it ended.
            TimeoutError: it is not ready in time.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._ready, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise TimeoutError(f"a vLLM server was not ready within {timeout_s:g} s{self._said()}")
        if not os.read(self._ready, 1):
            code = self._process.wait()
            raise ModelError(
                f"inference_model.backend=vllm_server: a server ended with code {code} while it started"
                f"{self._said()}"
            )

    def _said(self) -> str:
        if self._log is None:
            return "; its messages are above"
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"; its last lines in {self._log}: " + " | ".join(lines[-_LAST_LINES:])

    def kill(self) -> None:
        """End the server and its children at once."""
        # The group outlives its first process as long as a child lives, so its number is not used again.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._ready >= 0:
            os.close(self._ready)
            self._ready = -1
        shutil.rmtree(self._folder, ignore_errors=True)
