"""Checksums of weights that see every bit and its place, the same on every device.

A tensor is read as rows of 64-bit words ``w[r, j]``. Its checksum is ``sum_r M[r] sum_j m[j // d] w[r, j]``
modulo 2^64 with odd pseudo-random multipliers. One changed word always changes it, because an odd number
times a number other than zero is not zero. Rows, or words of different segments of ``d`` words, that change
places change it but for one case in about 2^60. Words inside a segment (128 to 512 bytes; one word in short
rows) share a multiplier, so that memory is read once and a sixteenth of it is multiplied. Their order does
not count here: :func:`ordered_row_sums` proves it once, when layouts are learned.

Rows are summed first, so that an engine which holds the rows elsewhere (fused matrices, heads in another
order) comes to the same number.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

# Bytes of a temporary on devices that have no product of an integer matrix and a vector.
_PIECE_BYTES = 2**26
_COLUMNS, _ROWS = 1, 2


@dataclass(frozen=True)
class Checksums:
    """What an engine, or the trainer, holds.

    Attributes:
        dtype: number format that the tensors were read in.
        values: by name of the published tensor, a checksum of each copy that is computed with; none where the
            tensor cannot be read.
    """

    dtype: str
    values: dict[str, tuple[int, ...]]


def checksum(tensor: Tensor) -> int:
    """The checksum of one tensor, the same on every device and for every memory layout."""
    return int(digest(tensor))


def checksums(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Checksums:
    """The checksums of named tensors in ``dtype``, read from the device in one go.

    Args:
        tensors: names and tensors; equal names are copies of the same one.
        dtype: their number format.
    """
    return gathered([(name, digest(tensor)) for name, tensor in tensors], dtype)


def gathered(sums: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Checksums:
    """Checksums out of what :func:`digest` returned, by name."""
    listed = list(sums)
    numbers = torch.stack([value for _, value in listed]).tolist() if listed else []
    values: dict[str, tuple[int, ...]] = {}
    for (name, _), number in zip(listed, numbers, strict=True):
        values[name] = (*values.get(name, ()), number)
    return Checksums(str(dtype).removeprefix("torch."), values)


def digest(tensor: Tensor) -> Tensor:
    """The checksum, a scalar int64 on the device: rows run along the last dimension, and a vector is one."""
    return combine(row_sums(tensor))


def combine(sums: Tensor) -> Tensor:
    """The checksum, a scalar on the device, of rows ``[R]`` in this order; see :func:`row_sums`."""
    return (sums * _multipliers(_ROWS, len(sums), sums.device)).sum()


def row_sums(tensor: Tensor) -> Tensor:
    """The sum ``[R]`` int64 of each row, over segments of words: what checksums are made of."""
    words = _words(tensor)
    return _weighted(words, _segment(words.shape[1]))


def ordered_row_sums(tensor: Tensor) -> Tensor:
    """A sum ``[R]`` int64 for each row that depends on the place of every word in it."""
    return _weighted(_words(tensor), 1)


def _weighted(words: Tensor, segment: int) -> Tensor:
    count = words.shape[1] // segment
    columns = _multipliers(_COLUMNS, count, words.device)
    rows = max(1, _PIECE_BYTES // (8 * max(1, count)))
    sums = []
    for piece in words.split(rows) if len(words) > rows else (words,):
        parts = piece.long() if segment == 1 else piece.view(-1, count, segment).sum(2)
        # Integer matrices have no product with a vector on a GPU.
        sums.append(parts.mv(columns) if parts.is_cpu else (parts * columns).sum(1))
    return sums[0] if len(sums) == 1 else torch.cat(sums)


@functools.cache
def _segment(count: int) -> int:
    """Words of a segment for rows of ``count`` words: 1 where they are short or nothing divides them."""
    return next((size for size in range(16, 65) if count >= 64 and count % size == 0), 1)


def _words(tensor: Tensor) -> Tensor:
    """The bits of ``tensor`` as a matrix of the widest integers that its rows divide into."""
    tensor = tensor.detach()
    if not tensor.numel():
        return torch.zeros(1, 1, dtype=torch.int64, device=tensor.device)
    # What is packed, as quantized weights are, has no rows: bitsandbytes keeps a column of single bytes.
    rows = tensor.dim() > 1 and tensor.is_floating_point()
    matrix = tensor.reshape(-1, tensor.shape[-1]) if rows else tensor.reshape(1, -1)
    matrix = matrix.contiguous()
    width = matrix.shape[1] * matrix.element_size()
    # By the width alone: the same rows must be read as the same words wherever they lie.
    word = next(
        word for word in (torch.int64, torch.int32, torch.int16, torch.uint8) if width % word.itemsize == 0
    )
    if matrix.storage_offset() * matrix.element_size() % word.itemsize:
        matrix = matrix.clone()
    return matrix.view(word)


@functools.cache
def _table(stream: int, size: int) -> numpy.ndarray:
    """Odd numbers of 64 bits: SplitMix64 (doi 10.1145/2660193.2660195) of the place, made odd."""
    with numpy.errstate(over="ignore"):
        state = numpy.arange(1, size + 1, dtype=numpy.uint64) + numpy.uint64(stream << 40)
        state *= numpy.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
        state ^= state >> numpy.uint64(31)
    return (state | numpy.uint64(1)).view(numpy.int64)


@functools.cache
def _on_device(stream: int, size: int, device: torch.device) -> Tensor:
    return torch.from_numpy(_table(stream, size)).to(device)


@functools.cache
def _multipliers(stream: int, count: int, device: torch.device) -> Tensor:
    # Sizes are rounded up to powers of two, so that a handful of tables serves all tensors.
    size = 2 ** math.ceil(math.log2(max(count, 1024)))
    return _on_device(stream, size, device)[:count]
