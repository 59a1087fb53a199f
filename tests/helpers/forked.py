"""Scripts in processes that begin with torch and its companions imported.

Importing takes six seconds of a core, which is most of what a small run takes. Here a process imports once,
and each script runs in a fork of it. The script sees the arguments, environment, folder and output of a
process of its own. What a new process does before and while it imports is seen only by tests that start one.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
# What a training process imports, before and while it trains. A package that is not installed is left out.
_CONTEXT.set_forkserver_preload(
    [
        "torchrl_grpo.cli.commands",
        "torchrl_grpo.cli.main",
        "torchrl_grpo.training.job",
        "torchrl_grpo.training.build",
        "torchrl_grpo.rollout.build",
        "torchrl_grpo.distributed.ranks",
        "torchrl_grpo.inference.transformers_engine",
        "transformers.models.llama.modeling_llama",
        "matplotlib.figure",
        "matplotlib.backends.backend_agg",
        "deepspeed",
    ]
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_script(
    argv: Sequence[object],
    *,
    ranks: int = 1,
    cwd: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    timeout: float = 240,
) -> subprocess.CompletedProcess[str]:
    """Run a script, or one in each of several training ranks as a launcher starts them.

    Args:
        argv: path of the script and its arguments.
        ranks: number of processes.
        cwd: folder to run in; this process's by default.
        environment: variables of the processes.
        timeout: seconds until all must have ended.

    Returns:
        What the processes wrote, one rank after the other, and the first exit code that is not 0.

    Raises:
        TimeoutError: a process has not ended in time; all are killed.
    """
    # A rank is what a launcher says, and not what the test is.
    variables = {k: v for k, v in environment.items() if k not in ("RANK", "WORLD_SIZE", "LD_PRELOAD")}
    if ranks > 1:
        variables |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = [str(word) for word in argv]
    with tempfile.TemporaryDirectory(prefix="torchrl-grpo-forked-") as scratch:
        processes, written = [], [Path(scratch, name) for name in ("stdout", "stderr")]
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            process = _CONTEXT.Process(
                target=_run, args=(words, str(cwd or Path.cwd()), variables | own, list(map(str, written)))
            )
            process.start()
            processes.append(process)
        codes = _codes(processes, time.monotonic() + timeout)
        texts = [path.read_text() if path.exists() else "" for path in written]
    return subprocess.CompletedProcess(words, next(filter(None, codes), 0), *texts)


def _codes(processes: Sequence[BaseProcess], deadline: float) -> list[int]:
    """Return exit codes in the order in which processes ended; after a failure the others are killed."""
    running, codes = list(processes), []
    try:
        while running:
            ended = wait([process.sentinel for process in running], timeout=deadline - time.monotonic())
            if not ended:
                raise TimeoutError(f"{len(running)} of {len(processes)} processes are still running")
            for process in [one for one in running if one.sentinel in ended]:
                process.join()
                running.remove(process)
                assert process.exitcode is not None
                codes.append(process.exitcode)
                if process.exitcode:
                    # As launchers do: the others would wait for it.
                    for other in running:
                        other.kill()
    finally:
        for process in running:
            process.kill()
            process.join()
    return codes


def _run(argv: list[str], cwd: str, environment: dict[str, str], written: list[str]) -> None:
    for number, path in enumerate(written, start=1):
        # Not sys.stdout alone: children and libraries in C write to the numbers.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv = argv
    # Where Python begins to look for modules of a script.
    sys.path.insert(0, str(Path(argv[0]).parent.resolve()))
    runpy.run_path(argv[0], run_name="__main__")
