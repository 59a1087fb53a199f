"""Brings what FSDP2 has divided together on rank 0, in threads beside training.

``torch.distributed.checkpoint`` would write a file of each rank. Its list of their contents is pickled, so
that reading it runs code, and no other program reads such a folder as a model.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as DividedAt
from torch.utils._pytree import tree_leaves, tree_map_only

from torchrl_grpo.distributed.ranks import Ranks


class Shard(NamedTuple):
    """The rows of a tensor that this rank holds. Ranks divide the first dimension, as ``torch.chunk`` does.

    Attributes:
        rows: own rows ``[n, ...]``; the last ranks may hold none.
        shape: shape of the whole tensor.
    """

    rows: Tensor
    shape: torch.Size


def own_part(tensor: Tensor, rows: Tensor | None = None) -> Tensor | Shard:
    """Return a tensor without its gradient history, or this rank's shard of it if the ranks divide it.

    Args:
        tensor: tensor.
        rows: a copy of what this rank holds of it, which is returned in its place.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach() if rows is None else rows
    assert tensor.placements == (DividedAt(0),), tensor.placements
    return Shard(tensor.to_local().detach() if rows is None else rows, tensor.shape)


def is_shard(value: object) -> bool:
    """Return whether ``value`` is a :class:`Shard`, which torch takes for a tuple."""
    return isinstance(value, Shard)


def send(content: Any, ranks: Ranks) -> None:
    """On all ranks but the first: send all shards of a nested structure, in its order, to :func:`gather`.

    Args:
        content: nested structure with shards. One at a time is copied to host memory if it is on a GPU.
        ranks: the ranks.

    Raises:
        RuntimeError: rank 0 has ended.
    """
    for shard in tree_leaves(content, is_leaf=is_shard):
        if is_shard(shard) and shard.rows.numel():
            dist.send(_on_host(shard.rows), dst=0, group=ranks.beside)


def _on_host(rows: Tensor) -> Tensor:
    try:
        return rows.cpu().contiguous()
    except (RuntimeError, MemoryError):
        # Rank 0 waits for these rows. It learns only from the end of this process that they do not come.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def gather(content: Any, ranks: Ranks) -> Any:
    """On rank 0: return a nested structure with whole tensors in place of its shards.

    Args:
        content: nested structure with as many shards as the other ranks send, in the same order.
        ranks: the ranks.

    Raises:
        RuntimeError: another rank has ended.
    """

    def whole(shard: Shard) -> Tensor:
        tensor = torch.empty(shard.shape, dtype=shard.rows.dtype)
        for rank, rows in enumerate(tensor.chunk(ranks.size)):
            if rank == 0:
                rows.copy_(shard.rows)
            elif rows.numel():
                dist.recv(rows, src=rank, group=ranks.beside)
        return tensor

    return tree_map_only(Shard, whole, content, is_leaf=is_shard)
