"""Copies small tensors to a GPU without waiting for it.

A copy from ordinary memory waits until the driver has read it. A copy from pinned memory is queued, and the
CPU goes on to launch kernels.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

T = TypeVar("T")


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor`` on ``device``. A copy from the CPU to a GPU is queued and not waited for."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def upload_packed(tree: T, device: torch.device) -> T:
    """Copy all vectors of a nested structure to ``device`` in one transfer.

    Args:
        tree: tuples, named tuples, lists and dictionaries with int64 vectors ``[n]`` on the CPU. Anything
            else in them stays as it is.
        device: device of the result. On the CPU, ``tree`` itself is returned.
    """
    if device.type == "cpu":
        return tree
    leaves, structure = tree_flatten(tree)
    vectors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    parts = iter(upload(torch.cat(vectors), device).split([len(vector) for vector in vectors]))
    moved: T = tree_unflatten([next(parts) if isinstance(x, Tensor) else x for x in leaves], structure)
    return moved
