"""Scripts in processes that begin with torch and its companions imported.

Importing takes six seconds of a core, which is most of what a small run takes. Here a process imports once,
and each script runs in a fork of it, with arguments, variables, a folder and an output of its own. Tests
start about a hundred, so this saves five minutes of ``make test``.

Only tests that start a process see what differs: what it does until it has imported and read ``config/``,
its seed of hashes, which all forks share, what a full garbage collection looks through, the end of the
interpreter, that TorchRL takes Ray for missing, and that no run draws ``report.png``.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any
from unittest import mock

import forked_workers
import psutil

from torchrl_grpo.planning.cores import PASSIVE_WAIT_ENV
from torchrl_grpo.runtime import rank_env

_ROOT = Path(__file__).resolve().parents[2]
# What other processes of the tests were told. Later, an engine or a test may have changed it.
_ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
_ENVIRONMENT |= {**PASSIVE_WAIT_ENV, "OMP_NUM_THREADS": "1"}
_HELPERS = str(Path(__file__).parent)
_ENVIRONMENT["PYTHONPATH"] = os.pathsep.join(filter(None, [_HELPERS, _ENVIRONMENT.get("PYTHONPATH")]))
# Importing must not touch a GPU, because a fork could not use it then.
_ENVIRONMENT["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
# Seconds that other ranks have to end when one has failed.
_GRACE_S = 10.0
CONTEXT = multiprocessing.get_context("forkserver")
# What a training process imports, before and while it trains. A package that is not installed is left out.
_PRELOADED = [
    "tests.helpers.ray_later",
    "torchrl_grpo.cli.commands",
    "torchrl_grpo.cli.main",
    "torchrl_grpo.cli.compose",
    "torchrl_grpo.training.job",
    "torchrl_grpo.training.build",
    "torchrl_grpo.rollout.build",
    "torchrl_grpo.distributed.ranks",
    "torchrl_grpo.inference.transformers_engine",
    "transformers.models.llama.modeling_llama",
    "deepspeed.runtime.zero.muon.original_muon",  # as each engine of it does, with the compiler
    "done_before_forks",
]
# What the engine imports when it starts.
_PRELOADED_OF_VLLM = ["vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.llama"]
CONTEXT.set_forkserver_preload(_PRELOADED)


def preload_vllm() -> None:
    """Import vLLM too, unless a script has been forked already. It takes eight seconds of a core."""
    # As the engine does before it imports vLLM.
    _ENVIRONMENT["VLLM_CONFIGURE_LOGGING"] = "0"
    CONTEXT.set_forkserver_preload([*_PRELOADED, *_PRELOADED_OF_VLLM])


def ensure_running() -> None:
    """Start the process that scripts are forks of, unless it runs."""
    # It finds modules in its folder, too, where a test may have put files of a user.
    with mock.patch.dict(os.environ, _ENVIRONMENT, clear=True), contextlib.chdir(_ROOT):
        forkserver.ensure_running()


def server_address() -> str:
    """Address of that process, for :mod:`forked_workers`."""
    ensure_running()
    server: Any = forkserver._forkserver
    return str(server._forkserver_address)


class Finished(subprocess.CompletedProcess[str]):
    """Processes that have ended.

    Attributes:
        codes: exit code of each rank.
    """

    codes: list[int]


def run_script(
    argv: Sequence[object],
    *,
    ranks: int = 1,
    cwd: Path | None = None,
    timeout: float = 500,
    variables: Mapping[str, str] = types.MappingProxyType({}),
) -> Finished:
    """Run a script, or one in each of several training ranks as a launcher starts them.

    Args:
        argv: path of the script and its arguments.
        ranks: number of processes.
        cwd: folder to run in; this process's by default.
        timeout: seconds until all must have ended.
        variables: set beside this process's.

    Returns:
        What the processes wrote, mixed as they wrote it, and the first exit code that is not 0.

    Raises:
        TimeoutError: a process has not ended in time; all are killed. The message ends with what they wrote.
    """
    variables = dict(variables)
    if ranks > 1:
        variables |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(rank_env.free_port())}
    words = [str(word) for word in argv]
    with tempfile.TemporaryDirectory(prefix="torchrl-grpo-forked-") as scratch:
        written = [Path(scratch, name) for name in ("stdout", "stderr")]
        for path in written:
            path.touch()
        processes: list[BaseProcess] = []
        try:
            for rank in range(ranks):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
                processes.append(_start(words, cwd, variables | own, written))
            _wait(processes, time.monotonic() + timeout)
        except TimeoutError as error:
            output = "".join(path.read_text()[-2_000:] for path in written)
            raise TimeoutError(f"{error}:\n{output}") from None
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()
        codes = [code for process in processes if (code := process.exitcode) is not None]
        done = Finished(words, next(filter(None, codes), 0), *(path.read_text() for path in written))
    done.codes = codes
    return done


FORKING_LAUNCH = Path(__file__).with_name("forking_launch.py")


def run_launcher(module: str, *words: object, cwd: Path) -> Finished:
    """Run ``python -m`` with the module of a launcher, whose ranks are forks."""
    return run_script([FORKING_LAUNCH, module, *words], cwd=cwd)


def forks() -> list[psutil.Process]:
    """All processes of this module that run, with ranks of launchers."""
    server: Any = forkserver._forkserver
    running: list[psutil.Process] = psutil.Process(server._forkserver_pid).children(recursive=True)
    return running


class ForkedPopen:
    """A script that runs, with the part of ``subprocess.Popen`` that tests and ``torchrl_grpo.tools`` use.

    Args:
        command: path of the Python interpreter, path of the script, and its arguments.
        cwd: folder to run in; this process's by default.
        stdout: file that gets what the script writes; by default it writes to the files of this process,
            and is the first process of a session.
        stderr: ``subprocess.STDOUT``.
        variables: set beside this process's.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: Path | None = None,
        stdout: IO[bytes] | None = None,
        stderr: int = subprocess.STDOUT,
        variables: Mapping[str, str] = types.MappingProxyType({}),
    ) -> None:
        assert command[0] == sys.executable and stderr == subprocess.STDOUT
        written = [Path(stdout.name)] * 2 if stdout else [Path(f"/proc/self/fd/{n}").readlink() for n in "12"]
        self._process = _start(command[1:], cwd, variables, written, is_session=stdout is None)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("forked", timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _start(
    words: Sequence[str],
    cwd: Path | None,
    variables: Mapping[str, str],
    written: Sequence[Path],
    is_session: bool = False,
) -> BaseProcess:
    """Start a script.

    Args:
        words: path of the script, and its arguments.
        cwd: folder to run in; this process's by default.
        variables: set beside this process's.
        written: paths of stdout and stderr.
        is_session: whether the process begins a session of its own.
    """
    ensure_running()
    # A rank is what a launcher says, and not what the test is. vLLM preloads libraries for later processes.
    own = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LD_PRELOAD")}
    own |= variables
    arguments = list(words), str(cwd or Path.cwd()), own, list(map(str, written)), is_session
    process = CONTEXT.Process(target=run_in_fork, args=arguments)
    process.start()
    return process


def _wait(processes: Sequence[BaseProcess], deadline: float) -> None:
    """Wait until all have ended, or one has failed and the others had time to end.

    Raises:
        TimeoutError: the deadline has passed, and none has failed.
    """
    running, failed = list(processes), False
    while running:
        ended = wait([process.sentinel for process in running], timeout=deadline - time.monotonic())
        if not ended and failed:
            # A launcher would end them now.
            return
        if not ended:
            raise TimeoutError(f"{len(running)} of {len(processes)} processes are still running")
        for process in [process for process in running if process.sentinel in ended]:
            process.join()
            running.remove(process)
            if process.exitcode and not failed:
                failed, deadline = True, time.monotonic() + _GRACE_S


def run_in_fork(
    argv: list[str],
    cwd: str,
    environment: dict[str, str],
    written: Sequence[str] = (),
    is_session: bool = True,
) -> None:
    """Run a script in this process, which is a fork. Arguments are those of ``_start``."""
    import numpy as np
    import torch

    # Now Ray may be imported, with the variables below.
    sys.modules.pop("ray", None)
    if is_session:
        os.setsid()
    for number, path in enumerate(written, start=1):
        # Not sys.stdout alone: children and libraries in C write to the numbers.
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    # What was imported stays. Full collections, as DeepSpeed and vLLM ask for, would look through it each
    # time. An engine of vLLM that ends would give it back to them.
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None
    # What a library reads from the environment, or draws, when it is imported.
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    np.random.seed()
    sys.argv = argv
    # Modules beside the tests are not there for a script, but those beside the script are.
    own = [entry for entry in sys.path if not Path(entry).resolve().is_relative_to(_ROOT / "tests")]
    chosen = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [str(Path(argv[0]).parent.resolve()), *chosen, *own]
    forked_workers.use_forks()
    try:
        runpy.run_path(argv[0], run_name="__main__")
    finally:
        # A fork leaves without them.
        atexit._run_exitfuncs()
