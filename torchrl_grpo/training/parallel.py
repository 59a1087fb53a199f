"""How the model is held by several training ranks: whole on each (DDP), or in shards (FSDP2, DeepSpeed).

The first two are torch's own; DeepSpeed's part is in :mod:`~torchrl_grpo.training.zero`. Accelerate starts
the processes and their groups (:mod:`~torchrl_grpo.training.ranks`); its ``prepare`` is not used: in version
1.15 it has no FSDP without a GPU, and it puts the output head into a unit that is gathered when the head's
``forward`` runs, which a chunked loss never calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

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
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from torchrl_grpo.models.logprobs import TokenScorer
from torchrl_grpo.models.shards import in_zero_shards
from torchrl_grpo.training.zero import ZeroNetwork, gathered
from torchrl_grpo.validation_ranges import ZERO_STAGES


def distribute(scorer: TokenScorer, kind: str, ranks: int, device: torch.device) -> nn.Module:
    """What the loss calls in place of ``scorer``.

    Args:
        scorer: around the model; with FSDP2 its parameters become shards, in place; with ZeRO-3 they do when
            the optimiser is there.
        kind: ``ddp``, ``fsdp2``, ``deepspeed_zero2`` or ``deepspeed_zero3``.
        ranks: training ranks; with one nothing is done.
        device: of this rank.
    """
    if ranks == 1:
        return scorer
    if kind == "ddp":
        on_gpu = [device] if device.type == "cuda" else None
        # Gradients as views of what is exchanged: not 4 bytes a weight twice.
        return DistributedDataParallel(
            scorer, device_ids=on_gpu, forward_sync_buffers=False, gradient_as_bucket_view=True
        )
    if kind in ZERO_STAGES:
        return ZeroNetwork(scorer, kind, device)
    mesh = init_device_mesh(device.type, (ranks,))
    precision = _gathered_as(scorer)
    names = scorer.model._no_split_modules or []
    for module in scorer.model.modules():
        if type(module).__name__ in names:
            fully_shard(module, mesh=mesh, mp_policy=precision)
    # Embedding, last norm and head: gathered for the whole of a forward pass, which uses the head. A head in
    # float32 must not be given weights that were rounded on the way.
    outer = MixedPrecisionPolicy() if scorer.head_dtype is torch.float32 else precision
    fully_shard(scorer, mesh=mesh, mp_policy=outer)
    register_fsdp_forward_method(scorer, "next_token_log_probs")
    return scorer


def _gathered_as(scorer: TokenScorer) -> MixedPrecisionPolicy:
    """In which format FSDP2 gathers weights; shards, and gradients between ranks, stay float32.

    Gathered in float32 they would travel at twice the size, and autocast would keep a copy of each in 16 bits
    until the pass ends, of which there is no need to be a whole model on any rank. Autocast stays: products
    are the same, and what it computes in float32 (the residual stream, norms, positions) stays so. Only the
    weights of norms and embeddings come rounded, as an engine in bfloat16 has them.
    """
    if scorer.autocast_dtype is None:
        return MixedPrecisionPolicy()
    # The first of the residual stream, to which layers add; else all of it would be in 16 bits.
    scorer.model.get_input_embeddings().register_forward_hook(_in_float32)
    for module in scorer.model.modules():
        if isinstance(module, nn.LayerNorm):
            # Torch's own on a CPU takes no weights in another format than its input.
            module.forward = partial(_layer_norm, module)  # type: ignore[method-assign]
    return MixedPrecisionPolicy(
        param_dtype=scorer.autocast_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def _in_float32(module: nn.Module, arguments: tuple[Any, ...], found: Tensor) -> Tensor:
    return found.float()


def _layer_norm(module: nn.LayerNorm, states: Tensor) -> Tensor:
    weight, bias = (None if one is None else one.to(states.dtype) for one in (module.weight, module.bias))
    return F.layer_norm(states, module.normalized_shape, weight, bias, module.eps)


def synchronising(network: object, last: bool) -> AbstractContextManager[None]:
    """With DDP gradients are exchanged in the last backward pass of a step, and add up locally before.

    With shards they are exchanged in each: whole gradients of several passes would not fit where shards do.
    """
    if isinstance(network, DistributedDataParallel) and not last:
        return network.no_sync()
    if isinstance(network, ZeroNetwork):
        network.engine.set_gradient_accumulation_boundary(last)
    return nullcontext()


@contextmanager
def resting(network: object) -> Iterator[None]:
    """Afterwards parameters are shards again, also those that a pass without gradients leaves gathered."""
    yield
    if isinstance(network, FSDPModule):
        network.reshard()


def sharded(network: object) -> bool:
    """Whether no rank has the whole model."""
    return isinstance(network, FSDPModule) or (isinstance(network, ZeroNetwork) and network.stage == 3)


def whole(tensor: Tensor) -> Tensor:
    """The tensor of which this may be a shard, without its history; every rank must ask."""
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
