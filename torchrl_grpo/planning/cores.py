"""Divide the CPU cores of a machine between training ranks and rollout workers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from torchrl_grpo.config import Config
from torchrl_grpo.planning.plan import Plan

# Environment variables that set how OpenMP threads wait for each other. OpenMP reads them when torch loads
# its library. By default, waiting threads spin so long that they slow down other processes on a shared
# machine: with another job on it, a step took 3 to 6 times as long. Threads that sleep at once wake too
# late for the many small products of decoding, which took a third longer. This number of spins, some
# microseconds, avoids both (docs/speed.md).
PASSIVE_WAIT_ENV = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}


def wait_passively() -> None:
    """Set how this process's OpenMP threads wait, unless the user has. Call it before torch is imported."""
    if not PASSIVE_WAIT_ENV.keys() & os.environ.keys():
        os.environ.update(PASSIVE_WAIT_ENV)


def allowed_cores() -> int:
    """Return the number of cores that this process may use; Slurm and taskset can allow fewer than exist."""
    return len(os.sched_getaffinity(0))


def divide_cores(cfg: Config, plan: Plan, cores: int, ranks: int) -> tuple[int, int]:
    """Return the CPU threads of each training rank, and of each worker or reference process.

    If ranks and workers compute on the CPU at the same time, each gets cores of its own. In a measurement on
    two cores, a step with two threads each was 2 to 3 times slower than with one thread each. If
    ``collector.max_policy_age`` is 0, ranks and workers take turns, so both use all cores.

    Args:
        cfg: configuration; both ``num_threads`` and ``collector`` are read.
        plan: placement of the roles.
        cores: number of cores to divide.
        ranks: number of training ranks on the machine.
    """
    ahead = plan.asynchronous and cfg.collector.max_policy_age > 0
    at_once = ahead and plan.engine_device == "cpu"
    workers = plan.num_engines + plan.reference_actors
    worker = cfg.inference_model.num_threads or max(1, cores // (workers + int(at_once)))
    left = cores - workers * worker if at_once else cores
    return cfg.train.num_threads or max(1, left // ranks), worker


def worker_env(threads: int) -> dict[str, str]:
    """Return the environment of a process, other than the trainer, that computes on ``threads`` cores."""
    return {
        "OMP_NUM_THREADS": str(threads),
        **PASSIVE_WAIT_ENV,
        # The process is no training rank but inherits the environment of one, so reset its variables.
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def visible_gpus(gpus: Sequence[int]) -> dict[str, str]:
    """Return the variable with which a process sees some of the GPUs of this one, in this order."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else None
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[gpu] if names else str(gpu) for gpu in gpus)}


def import_path() -> list[str]:
    """Return the entries of ``PYTHONPATH`` with which another process imports this project too."""
    root = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [root, *(entry for entry in inherited if entry and entry != root)]
