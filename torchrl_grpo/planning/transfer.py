"""Chooses how new weights reach the engines. Imports no torch."""

from __future__ import annotations

from torchrl_grpo.config.keys import bad_value
from torchrl_grpo.planning.request import Request

_KEY = "inference_model.weight_transfer"


def choose_transfer(request: Request, own_process: bool) -> str:
    """Return how weights travel: a value of ``inference_model.weight_transfer`` other than ``auto``.

    Args:
        request: request to the planner.
        own_process: whether the engines run in processes of their own.

    Raises:
        ConfigError: the engines of the plan cannot get weights in the way that was asked for.
    """
    if request.backend == "vllm_server":
        automatic = "shared_memory"
    else:
        automatic = "ray_objects" if own_process else "in_process"
    asked = request.weight_transfer
    if asked == "auto" or asked == automatic:
        return automatic
    if request.backend != "vllm_server":
        where = "in processes of their own, on Ray" if own_process else "in the trainer's process"
        raise bad_value(_KEY, asked, f"the engines of this plan run {where}", f"{_KEY}={automatic}")
    return asked
