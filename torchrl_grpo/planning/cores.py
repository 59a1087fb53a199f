"""How training ranks and rollout workers share the cores of a machine."""

from __future__ import annotations

import os

from torchrl_grpo.config import Config
from torchrl_grpo.planning.plan import Plan

# How OpenMP's threads wait for each other, in the environment of whoever computes; read when torch loads its
# library. For as long as they do by themselves they stop everybody else on a shared machine: with another job
# beside it a step took 3 to 6 times as long. Asleep at once they wake too late for the many small products of
# decoding: it took a third longer. This number of turns, some microseconds, costs neither (docs/speed.md).
WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}


def allowed_cores() -> int:
    """Cores that the system lets this process run on: fewer than the machine has under Slurm or taskset."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def divide_cores(cfg: Config, plan: Plan, cores: int, ranks: int) -> tuple[int, int]:
    """CPU threads of each training rank, and of each worker or process of the reference model.

    Where both compute on the CPU at the same time each gets cores of its own: two cores shared by two times
    two threads ran a step 2 to 3 times slower than one thread each (measured). With an age of zero only one
    of the two works at a time.

    Args:
        cfg: ``num_threads`` of both and ``collector`` are read.
        plan: who runs where.
        cores: to divide.
        ranks: training ranks on it.
    """
    ahead = plan.asynchronous and cfg.collector.max_policy_age > 0
    at_once = ahead and plan.engine_device == "cpu"
    workers = plan.workers + plan.reference_actors
    worker = cfg.inference_model.num_threads or max(1, cores // (workers + int(at_once)))
    left = cores - workers * worker if at_once else cores
    return cfg.train.num_threads or max(1, left // ranks), worker
