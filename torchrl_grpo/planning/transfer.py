"""Chooses how new weights reach the engines. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torchrl_grpo.config.engines import EngineKind
from torchrl_grpo.config.keys import bad_value
from torchrl_grpo.planning.request import Request

_KEY = "inference_model.weight_transfer"


def choose_transfer(request: Request, own_process: bool) -> str:
    """Return how weights travel: a value of ``inference_model.weight_transfer`` other than ``auto``.

    ``cuda_ipc`` and ``nccl`` are never chosen automatically, because they were not run on GPUs yet.

    Args:
        request: request to the planner.
        own_process: whether the engines run in processes of their own.

    Raises:
        ConfigError: the engines of the plan cannot get weights in the way that was asked for.
    """
    if request.engine.has_servers:
        automatic = "shared_memory"
    else:
        automatic = "ray_objects" if own_process else "in_process"
    way = request.weight_transfer
    if way == "auto" or way == automatic:
        return automatic
    if not request.engine.has_servers and not (own_process and way in ("cuda_ipc", "nccl")):
        where = "in processes of their own, on Ray" if own_process else "in the trainer's process"
        raise bad_value(_KEY, way, f"the engines of this plan run {where}", f"{_KEY}={automatic}")
    return way


def check_gpus(transfer: str, engine: EngineKind, trainer: Sequence[int], engines: Collection[int]) -> None:
    """Check that a GPU transfer channel works between the GPUs of a plan.

    Args:
        transfer: result of :func:`choose_transfer`.
        engine: what the engine can do.
        trainer: GPUs of the trainer; the first one sends. Empty on a CPU.
        engines: GPUs of the engines of this run.

    Raises:
        ConfigError: it does not.
    """
    if transfer == "cuda_ipc" and not trainer:
        host = "shared_memory" if engine.has_servers else "ray_objects"
        raise bad_value(_KEY, transfer, "the trainer has no GPU to share memory of", f"{_KEY}={host}")
    if transfer == "nccl" and trainer and trainer[0] in engines:
        wrong = f"an engine is on the trainer's GPU cuda:{trainer[0]}, and NCCL connects different GPUs only"
        raise bad_value(_KEY, transfer, wrong, f"{_KEY}=cuda_ipc")
