"""Checks a machine before a run: ``grpo-doctor --machine``. Each check ends with a figure, or with a fix.

``python -m torchrl_grpo.tools.gpu_check`` checks more, with whole runs.
"""

from __future__ import annotations

import importlib.metadata
import io
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path

from packaging.requirements import Requirement

from torchrl_grpo.config import Config
from torchrl_grpo.errors import ConfigError, UserError, typed_first_line
from torchrl_grpo.runtime import hardware, rank_env, screen, shared_memory
from torchrl_grpo.tools.gpu_check.results import Result, Status

_PACKAGE = "torchrl-grpo"
_GIB = 2**30
# Ray's object store and the queues between ranks of an engine. A container has 64 MiB unless it is told.
_SHARED_GIB = 1.0
# Two checkpoints of SmolLM2-135M with the averages of its optimizer take 3 GiB.
_DISK_GIB = 5.0
# Seconds that two ranks may take to import torch, to meet, and to add up.
_RANKS_LIMIT_S = 180
_ALL_REDUCE = """
import sys, torch, torch.distributed as dist
rank, path, backend = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=2)
total = torch.ones(1, device="cpu" if backend == "gloo" else f"cuda:{rank}") * (rank + 1)
dist.all_reduce(total)
assert total.item() == 3
dist.destroy_process_group()
"""


def versions() -> str:
    """Check Python and the packages against the ranges of this one."""
    wrong = []
    for text in importlib.metadata.requires(_PACKAGE) or []:
        requirement = Requirement(text)
        # An extra may be missing, and vLLM for a CPU is a build of its own.
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = hardware.installed_version(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version or 'missing'} and not {requirement.specifier}")
    if wrong:
        raise ConfigError(f"{'; '.join(wrong)}; run `make setup`, or pip install {_PACKAGE} again")
    return f"Python {platform.python_version()}, torch {hardware.installed_version('torch')}"


def devices() -> str:
    """Check the driver and the GPUs, which may be absent."""
    machine = hardware.present()
    if not machine.gpus and hardware.vllm_needs_gpu():
        raise ConfigError(
            "the vLLM that is installed is one for GPUs, and no GPU is visible here; check nvidia-smi and "
            "CUDA_VISIBLE_DEVICES, or run `make setup ACCELERATOR=cpu`"
        )
    memory = "" if machine.cpu_gib is None else f", {machine.cpu_gib:.1f} GiB of memory"
    return f"{len(machine.gpus)} GPUs, {os.cpu_count()} cores{memory}"


def shared() -> str:
    """Check the room in shared memory."""
    fix = "start the container with --shm-size=8g or --ipc=host"
    return _free(shared_memory.ROOT, _SHARED_GIB, fix)


def disk() -> str:
    """Check the room for runs and for temporary files."""
    fix = "make room, or write hydra.run.dir=FOLDER and set TMPDIR to a folder on another disk"
    return "; ".join(_free(folder, _DISK_GIB, fix) for folder in (Path.cwd(), Path(tempfile.gettempdir())))


def _free(folder: Path, least_gib: float, fix: str) -> str:
    try:
        free = shutil.disk_usage(folder).free / _GIB
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}; {fix}") from error
    if free < least_gib:
        raise ConfigError(f"{folder} has {free:.2f} GiB free, and {least_gib:g} are needed; {fix}")
    return f"{free:.1f} GiB free in {folder}"


def ports() -> str:
    """Check that processes of this machine reach each other."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=10):
                return f"127.0.0.1:{port} answered"
    except OSError as error:
        raise ConfigError(
            f"127.0.0.1: processes cannot reach each other ({error}); bring up the interface lo, or use a "
            "container with a loopback network"
        ) from error


def ranks() -> str:
    """Let two processes add up a number: by NCCL on two GPUs, or by gloo."""
    backend = "nccl" if len(hardware.present().gpus) > 1 else "gloo"
    inherited = {name: value for name, value in os.environ.items() if name not in rank_env.VARIABLES}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _ALL_REDUCE]
        processes = [
            subprocess.Popen(
                [*command, str(rank), f"{folder}/meeting", backend],
                env=inherited,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        limit = time.monotonic() + _RANKS_LIMIT_S
        try:
            errors = [process.communicate(timeout=limit - time.monotonic())[1] for process in processes]
        except subprocess.TimeoutExpired as error:
            raise ConfigError(_no_ranks(backend, f"no answer within {_RANKS_LIMIT_S} s")) from error
        finally:
            for process in processes:
                process.kill()
    for process, text in zip(processes, errors, strict=True):
        if process.returncode:
            raise ConfigError(_no_ranks(backend, (text.strip().splitlines() or ["it printed nothing"])[-1]))
    return f"two ranks added up by {backend}"


def _no_ranks(backend: str, why: str) -> str:
    name = "NCCL" if backend == "nccl" else "GLOO"
    return (
        f"two training ranks cannot add up a number by {backend} ({why}); name the network's interface in "
        f"{name}_SOCKET_IFNAME, or train with train_model.num_devices=1"
    )


def engine(cfg: Config) -> str:
    """Start the engine, publish weights to it with their verification, and let it answer."""
    from torchrl_grpo.training import job

    # The plan is not asked for.
    with (
        tempfile.TemporaryDirectory() as folder,
        screen.log_to_file(Path(folder) / "check.log"),
        redirect_stdout(io.StringIO()),
    ):
        metrics = job.evaluate(cfg, None)
    return (
        f"{cfg.inference_model.backend} with {cfg.model.name}: weights verified tensor by tensor, "
        f"{metrics['eval/response_length']:.1f} tokens an answer"
    )


def checks(cfg: Config) -> Mapping[str, Callable[[], str]]:
    """Return the checks by name, in the order in which they run.

    Args:
        cfg: configuration whose engine is started.
    """
    return {
        "versions": versions,
        "devices": devices,
        "shared memory": shared,
        "disk": disk,
        "ports": ports,
        "ranks": ranks,
        "engine": lambda: engine(cfg),
    }


def run_check(name: str, check: Callable[[], str]) -> Result:
    """Run one check; an error is its result."""
    start = time.monotonic()
    try:
        text = check()
    except UserError as error:
        return Result(name, Status.failed, time.monotonic() - start, reason=str(error))
    except Exception as error:  # noqa: BLE001  whatever is wrong with the machine is the result
        reason = f"{typed_first_line(error)}; `python -m torchrl_grpo.tools.gpu_check` says more"
        return Result(name, Status.failed, time.monotonic() - start, reason=reason)
    return Result(name, Status.passed, time.monotonic() - start, {"ok": text})
