"""Receipts of weights: a checksum of every tensor, noted down by whoever took it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

Receipt = dict[str, int]

_WORD = 8


def signed(weights: Iterable[tuple[str, Tensor]], receipt: Receipt) -> Iterator[tuple[str, Tensor]]:
    """The same weights; ``receipt`` gets an entry for each as it is taken."""
    for name, tensor in weights:
        yield name, tensor
        # After it was taken: a tensor handed out but never asked for leaves no receipt.
        receipt[name] = checksum(tensor)


def checksum(tensor: Tensor) -> int:
    """Sum of the tensor's bytes, eight at a time, as integers modulo 2^64.

    Exact, and the same in any order of summation and wherever the tensor lies.
    """
    # Words as wide as their sum: of narrower ones torch makes a wider copy, a fifth of a publication.
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    whole = len(flat) // _WORD * _WORD
    words, rest = flat[:whole], flat[whole:]
    if words.storage_offset() % _WORD:
        words = words.clone()
    return int(words.view(torch.int64).sum()) + int(rest.sum(dtype=torch.int64))
