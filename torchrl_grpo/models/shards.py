"""Sharded parameters. Those of FSDP2 know their full shape, and those of DeepSpeed's ZeRO-3 are empty."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel


def in_zero_shards(parameter: Tensor) -> bool:
    """Whether DeepSpeed shards the parameter (ZeRO-3). Such a parameter is empty except while it is used."""
    return hasattr(parameter, "ds_id")


def local_shard(parameter: Tensor) -> Tensor:
    """Return this rank's shard of a parameter, detached. DeepSpeed's shards are flat vectors."""
    if isinstance(parameter, DTensor):
        return parameter.to_local().detach()
    kept: Tensor = parameter.ds_tensor if in_zero_shards(parameter) else parameter  # type: ignore[attr-defined]
    return kept.detach()


def count_parameters(model: PreTrainedModel) -> int:
    """Count the parameters of the whole model, even if this rank has only a shard."""
    parameters = list(model.parameters())
    if any(map(in_zero_shards, parameters)):
        return sum(parameter.ds_numel for parameter in parameters)
    return int(model.num_parameters())
