"""How the model is held by several training ranks: whole on each (DDP), or in shards (FSDP2, DeepSpeed).

The first two are torch's own; DeepSpeed's part is in :mod:`~torchrl_grpo.distributed.deepspeed`. Accelerate
starts the processes and their groups (:mod:`~torchrl_grpo.distributed.ranks`). Its ``prepare`` is not used:
in version 1.15 it has no FSDP without a GPU, and it puts the output head into a unit that is gathered when
the head's ``forward`` runs, which a chunked loss never calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from torchrl_grpo.config.values import ZERO_STAGES
from torchrl_grpo.distributed.deepspeed import ZeroNetwork, gathered
from torchrl_grpo.distributed.gathering import layers_of
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.models.shards import in_zero_shards


def distribute(scorer: TokenScorer, kind: str, ranks: int, device: torch.device) -> nn.Module:
    """What the loss calls in place of ``scorer``.

    Args:
        scorer: scorer of the model. With FSDP2 the model's parameters become shards, in place. With ZeRO-3
            they do when the optimizer is made.
        kind: ``ddp``, ``fsdp2``, ``deepspeed_zero2`` or ``deepspeed_zero3``.
        ranks: training ranks; with one nothing is done.
        device: device of this rank.
    """
    if ranks == 1:
        return scorer
    if kind == "ddp":
        # Gradients as views of what is exchanged: not 4 bytes a weight twice. Without device_ids, inputs stay
        # on the CPU, where the scorer reads their lengths.
        return DistributedDataParallel(scorer, forward_sync_buffers=False, gradient_as_bucket_view=True)
    if kind in ZERO_STAGES:
        return ZeroNetwork(scorer, kind, device)
    mesh = init_device_mesh(device.type, (ranks,))
    layers = layers_of(scorer, device)
    shards: list[FSDPModule] = []
    for layer in layers:
        for norm in layer.norms:
            # So small that it stays gathered until its gradient is there.
            fully_shard(norm, mesh=mesh, mp_policy=MixedPrecisionPolicy(), reshard_after_forward=False)
        precision = _in_16_bits(scorer.autocast_dtype) if layer.in_16_bits else MixedPrecisionPolicy()
        shards.append(fully_shard(layer.module, mesh=mesh, mp_policy=precision))
    for (before, module), layer in zip(pairwise(shards), layers[1:], strict=False):
        # In the backward pass torch would fetch what ran just before in its place: a norm of the same layer.
        if layer.norms and type(before) is type(module):
            module.set_modules_to_backward_prefetch([before])
    # Embedding, last norm and head: gathered for the whole of a forward pass, which uses the head.
    fully_shard(scorer, mesh=mesh, mp_policy=MixedPrecisionPolicy())
    register_fsdp_forward_method(scorer, "next_token_log_probs")
    return scorer


def _in_16_bits(dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """Gather weights in ``dtype``; shards, and gradients between ranks, stay float32.

    Gathered in float32 they would travel at twice the size, and autocast would keep a copy of each in 16 bits
    until the pass ends, of which there is no need to be a whole model on any rank. Autocast stays: products
    are the same, and what it computes in float32 (the residual stream, norms, positions) stays so.
    """
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


def synchronizing(network: object, last: bool) -> AbstractContextManager[None]:
    """With DDP gradients are exchanged in the last backward pass of a step, and add up locally before.

    With shards they are exchanged in each: whole gradients of several passes would not fit where shards do.
    """
    if isinstance(network, DistributedDataParallel) and not last:
        return network.no_sync()
    if isinstance(network, ZeroNetwork):
        network.engine.set_gradient_accumulation_boundary(last)
    return nullcontext()


@contextmanager
def reshard_after(network: object) -> Iterator[None]:
    """Afterwards parameters are shards again, also those that a pass without gradients leaves gathered.

    An update moves the shards. Whatever stayed gathered would keep the weights from before it.
    """
    yield
    if isinstance(network, nn.Module):
        # One by one: a module reshards itself alone, and norms are modules of their own.
        for module in network.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def sharded(network: object) -> bool:
    """Whether no rank has the whole model."""
    return isinstance(network, FSDPModule) or (isinstance(network, ZeroNetwork) and network.stage == 3)


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor of which ``tensor`` may be a shard, without its gradient history.

    Every rank must call this.
    """
    if in_zero_shards(tensor):
        with gathered(tensor) as found:
            return found.clone()
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


@contextmanager
def writable(parameter: Tensor) -> Iterator[Tensor]:
    """What every rank must change of ``parameter``, all of it in the same way: its shard, or the whole."""
    if in_zero_shards(parameter):
        with gathered(parameter, writable=True) as found:
            yield found
    else:
        values = parameter.data
        yield values.to_local() if isinstance(values, DTensor) else values


def shard_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A copy of a whole tensor on the device of ``parameter``, of one in shards the shard of this rank.

    Args:
        tensor: may lie in a file; no other part of it is read. Every rank has it, and none sends any.
        parameter: divided as :func:`distribute` does.
    """
    if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
        return tensor.to(parameter.device, copy=True)
    assert parameter.placements == (Shard(0),), parameter.placements
    mesh = parameter.device_mesh
    # Rows beyond the last rank's are none, and so is its part.
    own = dict(enumerate(tensor.chunk(mesh.size()))).get(mesh.get_local_rank(), tensor[:0])
    local = own.to(parameter.device, copy=True)
    return DTensor.from_local(
        local, mesh, parameter.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
