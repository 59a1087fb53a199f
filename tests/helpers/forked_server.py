"""Servers of vLLM as forks of a process that has imported vLLM, which takes ten seconds of a core.

Supervised processes (:mod:`torchrl_grpo.runtime.supervised`) can be forks of it, too, so that a judge, a
reward model or a chat of TorchRL need not import torch and vLLM again. Tests of the commands themselves start
real ones: tests/inference/test_vllm_server.py and tests/runtime/test_supervised.py.
"""

from __future__ import annotations

import contextlib
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
from torchrl_grpo.runtime import supervised


def start_server(launch: Launch, log: Path) -> ServerProcess:
    """Start a server; its processes are forks of each other, too."""
    preload_vllm()
    launch = dataclasses.replace(launch, words=forking_words(launch.words))
    with forked_processes():
        return ServerProcess(VLLM, launch, environment={"OMP_NUM_THREADS": "1"}, log=log)


def forked_processes() -> contextlib.AbstractContextManager[object]:
    """Inside this context, servers and supervised processes start as forks."""
    return mock.patch.object(subprocess, "Popen", _ForkedProcess)


class _ForkedProcess(ForkedPopen):
    """The part of ``subprocess.Popen`` that a server or a supervisor is started with."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: dict[str, str],
        pass_fds: Sequence[int],
        stdin: int,
        start_new_session: bool,
        stdout: IO[bytes] | None = None,
        stderr: IO[bytes] | None = None,
    ) -> None:
        assert command[0] == sys.executable and stdin == subprocess.PIPE
        assert stdout is stderr and start_new_session
        (passed,) = pass_fds
        output = 2 if stdout is None else stdout.fileno()
        read, write = os.pipe()
        self.stdin = os.fdopen(write, "wb")
        # Only connections reach a fork.
        ends = [
            Connection(read, writable=False),
            *(Connection(os.dup(number), readable=False) for number in (output, passed)),
        ]
        ensure_running()
        self._process = CONTEXT.Process(target=_serve, args=(command[1:], env, *ends))
        self._process.start()
        for end in ends:
            end.close()


def _serve(
    argv: list[str], environment: dict[str, str], stdin: Connection, output: Connection, passed: Connection
) -> None:
    import torch

    for number, end in enumerate((stdin, output, output)):
        os.dup2(end.fileno(), number)
    # What the first process has read from its own environment.
    if environment.get("TORCH_COMPILE_DISABLE") == "1":
        torch.compiler.set_stance("force_eager")
    tempfile.tempdir = None
    if supervised.__name__ in argv:
        # The process that forks is the supervisor's parent, and the socket has another number here.
        module = argv[argv.index(supervised.__name__) + 3 :]
        argv = [__file__, str(os.getppid()), str(passed.fileno()), *module]
    run_in_fork(argv, str(Path.cwd()), {**environment, READY_VARIABLE: str(passed.fileno())})


if __name__ == "__main__":
    parent, number, module, *arguments = sys.argv[1:]
    if module.endswith(".judge_program"):
        import forking_server  # noqa: F401  (its engine is a fork of it)
    supervised.main(int(parent), int(number), module, arguments)
