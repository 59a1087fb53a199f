"""Receipts of weights: a checksum of every tensor, noted down by whoever took it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

Receipt = dict[str, int]


def signed(weights: Iterable[tuple[str, Tensor]], receipt: Receipt) -> Iterator[tuple[str, Tensor]]:
    """The same weights; ``receipt`` gets an entry for each as it is taken."""
    for name, tensor in weights:
        yield name, tensor
        # After it was taken: a tensor handed out but never asked for leaves no receipt.
        receipt[name] = checksum(tensor)


def checksum(tensor: Tensor) -> int:
    """Sum of the tensor's bit patterns as integers: exact, and in any order of summation the same."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return int(tensor.contiguous().view(kinds[tensor.element_size()]).sum(dtype=torch.int64))
