"""How training ranks and rollout workers share the cores of a machine. Imports no torch."""

from __future__ import annotations

from torchrl_grpo.config import Config
from torchrl_grpo.devices_plan import Plan


def divide_cores(cfg: Config, plan: Plan, cores: int, ranks: int) -> tuple[int, int]:
    """CPU threads of each training rank, and of each worker.

    Where both compute on the CPU at the same time each gets cores of its own: two cores shared by two times
    two threads ran a step 2 to 3 times slower than one thread each (measured). With an age of zero only one
    of the two works at a time.

    Args:
        cfg: ``num_threads`` of both and ``collector`` are read.
        plan: who runs where.
        cores: of this machine.
        ranks: training ranks on it.
    """
    ahead = plan.asynchronous and cfg.collector.max_policy_age > 0
    at_once = ahead and plan.engine_device == "cpu"
    worker = cfg.inference_model.num_threads or max(1, cores // (plan.workers + int(at_once)))
    left = cores - plan.workers * worker if at_once else cores
    return cfg.train.num_threads or max(1, left // ranks), worker
