"""How the model is held by several training ranks: whole on each (DDP), or in shards (FSDP2, DeepSpeed).

The first two are torch's own; DeepSpeed's part is in :mod:`~torchrl_grpo.distributed.deepspeed`. Accelerate
starts the processes and their groups (:mod:`~torchrl_grpo.distributed.ranks`). Its ``prepare`` is not used:
in version 1.15 it has no FSDP without a GPU, and it puts the output head into a unit that is gathered when
the head's ``forward`` runs, which a chunked loss never calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from torchrl_grpo.config.values import ZERO_STAGES
from torchrl_grpo.distributed.deepspeed import ZeroNetwork, gathered
from torchrl_grpo.distributed.gathering import layers_of
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.models.shards import in_zero_shards

# Positional and named arguments of a call.
_Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def distribute(scorer: TokenScorer, kind: str, ranks: int, device: torch.device) -> nn.Module:
    """Return the module that the loss calls in place of ``scorer``.

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
        # Gradients are views of DDP's buckets, which saves 4 bytes per weight. Without device_ids, inputs
        # stay on the CPU, where the scorer reads their lengths.
        return DistributedDataParallel(scorer, forward_sync_buffers=False, gradient_as_bucket_view=True)
    if kind in ZERO_STAGES:
        return ZeroNetwork(scorer, kind, device)
    mesh = init_device_mesh(device.type, (ranks,))
    layers = layers_of(scorer, device)
    shards: list[FSDPModule] = []
    for layer in layers:
        for norm in layer.norms:
            # A norm is so small that it stays gathered until its gradient is computed.
            fully_shard(norm, mesh=mesh, mp_policy=MixedPrecisionPolicy(), reshard_after_forward=False)
        precision = _in_16_bits(scorer.autocast_dtype) if layer.in_16_bits else MixedPrecisionPolicy()
        shards.append(fully_shard(layer.module, mesh=mesh, mp_policy=precision))
    for (before, module), layer in zip(pairwise(shards), layers[1:], strict=False):
        # By default, the backward pass of a module prefetches the module that ran before it in the forward
        # pass. That is a norm of the same layer, so name the previous layer instead.
        if layer.norms and type(before) is type(module):
            module.set_modules_to_backward_prefetch([before])
    # Embedding, last norm and head: gathered for the whole of a forward pass, which uses the head.
    fully_shard(scorer, mesh=mesh, mp_policy=MixedPrecisionPolicy())
    register_fsdp_forward_method(scorer, "next_token_log_probs")
    # The first hook runs before FSDP2's own, and the last one after it.
    scorer.register_forward_pre_hook(_hide_inputs, prepend=True, with_kwargs=True)
    scorer.register_forward_pre_hook(_show_inputs, with_kwargs=True)
    return scorer


def _hide_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Inputs:
    """Put the inputs into a function, which FSDP2 does not look into.

    FSDP2 moves the inputs of the outermost module to the GPU. The scorer reads their lengths on the CPU, so
    it would wait for the GPU in every micro-batch to get them back.
    """
    return (lambda: (args, kwargs),), {}


def _show_inputs(module: nn.Module, args: tuple[Callable[[], _Inputs]], kwargs: dict[str, Any]) -> _Inputs:
    return args[0]()


def _in_16_bits(dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """Gather weights in ``dtype``; shards, and gradients between ranks, stay float32.

    Gathered in float32, weights would travel at twice the size. Autocast would also keep a copy of each
    weight in 16 bits until the pass ends, so that every rank would hold a whole model in 16 bits. Autocast
    stays on: products are the same, and what it computes in float32 (the residual stream, norms, positions)
    stays so.
    """
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


def synchronizing(network: object, last: bool) -> AbstractContextManager[None]:
    """Surround a backward pass of a step.

    With DDP, gradients add up on each rank and are exchanged in the last pass. With shards they are exchanged
    in every pass, because the whole gradients would not fit into the memory of one rank.
    """
    if isinstance(network, DistributedDataParallel) and not last:
        return network.no_sync()
    if isinstance(network, ZeroNetwork):
        network.engine.set_gradient_accumulation_boundary(last)
    return nullcontext()


@contextmanager
def reshard_after(network: object) -> Iterator[None]:
    """Make all parameters shards again at the end of the block.

    A pass without gradients leaves some of them gathered. An update changes the shards, so a parameter that
    stayed gathered would keep its old weights.
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
        with gathered(tensor) as whole:
            return whole.clone()
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


@contextmanager
def writable(parameter: Tensor) -> Iterator[Tensor]:
    """Yield the tensor to write to: this rank's shard, or the whole parameter.

    Every rank must make the same change.
    """
    if in_zero_shards(parameter):
        with gathered(parameter, writable=True) as whole:
            yield whole
    else:
        values = parameter.data
        yield values.to_local() if isinstance(values, DTensor) else values


def shard_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Copy a whole tensor to the device of ``parameter``; if that is in shards, copy only this rank's shard.

    Args:
        tensor: whole tensor, possibly mapped from a file, of which only this rank's part is read. Every rank
            passes it, and nothing is sent between ranks.
        parameter: parameter that :func:`distribute` may have divided.
    """
    if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
        return tensor.to(parameter.device, copy=True)
    assert parameter.placements == (Shard(0),), parameter.placements
    mesh = parameter.device_mesh
    # There may be fewer chunks than ranks. The last ranks then hold no rows.
    own = dict(enumerate(tensor.chunk(mesh.size()))).get(mesh.get_local_rank(), tensor[:0])
    local = own.to(parameter.device, copy=True)
    return DTensor.from_local(
        local, mesh, parameter.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
