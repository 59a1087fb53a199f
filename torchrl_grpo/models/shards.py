"""Parameters of which this rank has a part: those of FSDP2 know their shape, DeepSpeed leaves them empty."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel


def in_zero_shards(parameter: Tensor) -> bool:
    """Whether DeepSpeed keeps it in shards (ZeRO-3): the parameter itself is then empty outside its use."""
    return hasattr(parameter, "ds_id")


def own_part(parameter: Tensor) -> Tensor:
    """What this rank keeps of it, detached; of one in shards of DeepSpeed's a vector."""
    if isinstance(parameter, DTensor):
        return parameter.to_local().detach()
    kept: Tensor = parameter.ds_tensor if in_zero_shards(parameter) else parameter  # type: ignore[attr-defined]
    return kept.detach()


def count_parameters(model: PreTrainedModel) -> int:
    """Parameters of the whole model, of which this rank may have a part."""
    parameters = list(model.parameters())
    if any(map(in_zero_shards, parameters)):
        return sum(parameter.ds_numel for parameter in parameters)
    return int(model.num_parameters())
