"""Servers of vLLM as forks of a process that has imported vLLM, which takes ten seconds of a core.

A test of the command itself starts a real one: tests/inference/test_vllm_server.py.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO
from unittest import mock

from forked import CONTEXT, ForkedPopen, ensure_running, preload_vllm, run_in_fork
from forking_serve import forking_words

from torchrl_grpo.inference.servers.kinds import VLLM
from torchrl_grpo.inference.servers.launch import Launch
from torchrl_grpo.inference.servers.lifetime import READY_VARIABLE
from torchrl_grpo.inference.servers.process import ServerProcess


def start_server(launch: Launch, log: Path) -> ServerProcess:
    """Start a server; its processes are forks of each other, too."""
    preload_vllm()
    launch = dataclasses.replace(launch, words=forking_words(launch.words))
    with mock.patch.object(subprocess, "Popen", _ForkedServer):
        return ServerProcess(VLLM, launch, environment={"OMP_NUM_THREADS": "1"}, log=log)


class _ForkedServer(ForkedPopen):
    """The part of ``subprocess.Popen`` that a server is started with."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: dict[str, str],
        stdout: IO[bytes],
        pass_fds: Sequence[int],
        stdin: int,
        stderr: IO[bytes],
        start_new_session: bool,
    ) -> None:
        assert command[0] == sys.executable and stdin == subprocess.PIPE
        assert stdout is stderr and start_new_session
        (ready,) = pass_fds
        read, write = os.pipe()
        self.stdin = os.fdopen(write, "wb")
        # Only connections reach a fork.
        ends = [
            Connection(read, writable=False),
            *(Connection(os.dup(number), readable=False) for number in (stdout.fileno(), ready)),
        ]
        ensure_running()
        self._process = CONTEXT.Process(target=_serve, args=(command[1:], env, *ends))
        self._process.start()
        for end in ends:
            end.close()


def _serve(
    argv: list[str], environment: dict[str, str], stdin: Connection, output: Connection, ready: Connection
) -> None:
    import torch

    for number, end in enumerate((stdin, output, output)):
        os.dup2(end.fileno(), number)
    # What the first process has read from its own environment.
    if environment.get("TORCH_COMPILE_DISABLE") == "1":
        torch.compiler.set_stance("force_eager")
    tempfile.tempdir = None
    run_in_fork(argv, str(Path.cwd()), {**environment, READY_VARIABLE: str(ready.fileno())})
