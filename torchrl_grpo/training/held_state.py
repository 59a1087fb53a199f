"""What an update changes, as a checkpoint takes it from all training ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from torchrl_grpo.distributed import shard_transfer
from torchrl_grpo.distributed.parallelism import full_tensor, sharded
from torchrl_grpo.models import lora
from torchrl_grpo.training.learner import Learner


@torch.no_grad()
def read(learner: Learner, step: int, copies: bool) -> dict[str, Any]:
    """Return the weights and the state of the optimizer, schedule and coefficients.

    Every rank must call this. With FSDP2 the other ranks then send their shards in a thread, and
    :func:`~torchrl_grpo.distributed.shard_transfer.gather` receives them on rank 0.

    Args:
        learner: learner of this rank.
        step: number of the checkpoint, for messages.
        copies: whether shards on a GPU are copied to host memory first, so that they may change.

    Returns:
        ``"optimise"``, and ``"weights"``, which is None if the model itself is saved.
    """
    # Those of the checkpoint before may still be on their way.
    learner.sender.finish()
    # The name is that of stored checkpoints.
    held = {"optimise": learner.optimizer_step.state_dict(), "weights": _weights(learner)}
    if isinstance(learner.network, FSDPModule):
        if learner.device.type == "cuda":
            # The update may still run in this thread's stream, which vLLM may have replaced.
            torch.cuda.current_stream(learner.device).record_event().synchronize()
            if copies:
                held = learner.host_copies(held, learner.device)
            else:
                learner.host_copies.free()
        if not learner.ranks.is_main:
            learner.sender.start(step, lambda has_read: shard_transfer.send(held, learner.ranks))
    return held


def _weights(learner: Learner) -> dict[str, Tensor | shard_transfer.Shard] | None:
    if lora.adapted_layers(learner.model):
        return None
    if isinstance(learner.network, FSDPModule):
        return {name: shard_transfer.own_part(weight) for name, weight in learner.model.named_parameters()}
    if sharded(learner.network):
        # All help to gather one at a time, and rank 0 keeps it.
        named = ((name, full_tensor(weight)) for name, weight in learner.model.named_parameters())
        return {name: whole.cpu() for name, whole in named if learner.ranks.is_main}
    return learner.model.state_dict() if learner.device.type == "cuda" else None
