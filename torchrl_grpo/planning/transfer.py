"""Chooses how new weights reach the engines. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torchrl_grpo.config.engines import EngineKind
from torchrl_grpo.config.keys import bad_value
from torchrl_grpo.planning.request import Request

_KEY = "inference_model.weight_transfer"
_FROM_GPU_TO_GPU = ("cuda_ipc", "nccl")


def choose_transfer(request: Request, own_process: bool, on_gpu: bool) -> tuple[str, str]:
    """Return how weights travel, and why they do not travel from GPU to GPU.

    Args:
        request: request to the planner.
        own_process: whether the engines run in processes of their own.
        on_gpu: whether this machine's GPUs are used.

    Returns:
        A value of ``inference_model.weight_transfer`` other than ``auto``, and the reason: empty if there is
        nothing to say.

    Raises:
        ConfigError: the engines of the plan cannot get weights in the way that was asked for.
    """
    host = _host_way(request.engine) if own_process else "in_process"
    way, why_not = request.weight_transfer, ""
    if way == "auto":
        return _automatic(request, host) if own_process and on_gpu else (host, why_not)
    possible = way == host or (own_process and way in _FROM_GPU_TO_GPU)
    if not request.engine.has_servers and not possible:
        where = "in processes of their own, on Ray" if own_process else "in the trainer's process"
        raise bad_value(_KEY, way, f"the engines of this plan run {where}", f"{_KEY}={host}")
    return way, why_not


def _automatic(request: Request, host: str) -> tuple[str, str]:
    if request.engine.has_servers and not request.engine.takes_gpu_weights:
        return host, f"{request.engine.program}'s servers take none from GPU to GPU"
    if request.needs_copy:
        return host, f"{request.needs_copy} needs a copy of them"
    return ("nccl" if request.elsewhere else "cuda_ipc"), ""


def _host_way(engine: EngineKind) -> str:
    return "shared_memory" if engine.has_servers else "ray_objects"


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
        wrong = "the trainer has no GPU to share memory of"
        raise bad_value(_KEY, transfer, wrong, f"{_KEY}={_host_way(engine)}")
    if transfer == "nccl" and trainer and trainer[0] in engines:
        wrong = f"an engine is on the trainer's GPU cuda:{trainer[0]}, and NCCL connects different GPUs only"
        raise bad_value(_KEY, transfer, wrong, f"{_KEY}=cuda_ipc")
