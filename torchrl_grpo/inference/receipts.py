"""Receipts of weights: a checksum of every tensor, noted down by whoever took it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

Receipt = dict[str, int]

# Numbers summed at a time; widened they fit a processor's cache.
_BLOCK = 2**18


def signed(weights: Iterable[tuple[str, Tensor]], receipt: Receipt) -> Iterator[tuple[str, Tensor]]:
    """The same weights; ``receipt`` gets an entry for each as it is taken."""
    for name, tensor in weights:
        yield name, tensor
        # After it was taken: a tensor handed out but never asked for leaves no receipt.
        receipt[name] = checksum(tensor)


def checksum(tensor: Tensor) -> int:
    """Sum of the tensor's bit patterns as integers: exact, and in any order of summation the same."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.contiguous().view(kinds[tensor.element_size()]).view(-1)
    # Block by block: torch widens what it sums, and a widened copy of a large matrix, for a moment of each
    # publication, is memory that the process then keeps.
    return int(torch.stack([block.sum(dtype=torch.int64) for block in bits.split(_BLOCK)]).sum())
