"""Computes checksums of weights that depend on every bit and are equal on every device.

A tensor is read as rows of 64-bit words ``w[r, j]``. Its checksum is ``sum_r M[r] sum_j m[j // d] w[r, j]``
modulo 2^64, with odd pseudo-random multipliers ``M`` and ``m``. A single changed word always changes the
checksum, because an odd number times a nonzero number is not zero modulo 2^64. Two swapped rows change it
too, except in about one case in 2^60. The same holds for two swapped words of different segments.

A segment has ``d`` words (128 to 512 bytes). Its words share a multiplier, so memory is read once and at most
a sixteenth of it is multiplied. In short rows, each segment is one word. The checksum ignores the order of
words inside a segment. :func:`ordered_row_sums` checks this order once, when layouts are learned.

Rows are summed first. An engine that stores the rows elsewhere (fused matrices, heads in another order)
therefore gets the same checksum.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

# Size in bytes of the temporary on devices that cannot multiply an integer matrix by a vector.
_PIECE_BYTES = 2**26
_COLUMNS, _ROWS = 1, 2


@dataclass(frozen=True)
class Checksums:
    """Checksums of the weights that an engine or the trainer holds.

    Attributes:
        dtype: data type that the tensors were read in.
        values: checksums by name of the published tensor, one for each copy that the engine computes with. A
            tensor that cannot be read has none.
    """

    dtype: str
    values: dict[str, tuple[int, ...]]


def checksum(tensor: Tensor) -> int:
    """Compute the checksum of one tensor, which is equal on every device and for every memory layout."""
    return int(checksum_tensor(tensor))


def compute_checksums(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Checksums:
    """Compute the checksums of named tensors, and copy them from the device in one transfer.

    Args:
        tensors: names and tensors. Tensors with equal names are copies of one tensor.
        dtype: data type of the tensors.
    """
    return collect_checksums([(name, checksum_tensor(tensor)) for name, tensor in tensors], dtype)


def collect_checksums(sums: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Checksums:
    """Collect the results of :func:`checksum_tensor` by name.

    Args:
        sums: names and checksums, each a scalar on the device.
        dtype: data type of the tensors.
    """
    listed = list(sums)
    numbers = torch.stack([value for _, value in listed]).tolist() if listed else []
    values: dict[str, tuple[int, ...]] = {}
    for (name, _), number in zip(listed, numbers, strict=True):
        values[name] = (*values.get(name, ()), number)
    return Checksums(str(dtype).removeprefix("torch."), values)


def checksum_tensor(tensor: Tensor) -> Tensor:
    """Compute the same checksum as :func:`checksum`, as an int64 scalar on the device.

    Rows run along the last dimension. A vector is one row.
    """
    return combine(row_sums(tensor))


def combine(sums: Tensor) -> Tensor:
    """Combine the sums ``[R]`` of rows (see :func:`row_sums`) to a checksum, a scalar on the device.

    The result depends on the order of the rows.
    """
    return (sums * _multipliers(_ROWS, len(sums), sums.device)).sum()


def row_sums(tensor: Tensor) -> Tensor:
    """Compute the sum ``[R]`` int64 of each row, weighted by segment, from which checksums are made."""
    words = _words(tensor)
    return _weighted(words, _segment(words.shape[1]))


def ordered_row_sums(tensor: Tensor) -> Tensor:
    """Compute a sum ``[R]`` int64 for each row that depends on the position of every word in the row."""
    return _weighted(_words(tensor), 1)


def _weighted(words: Tensor, segment: int) -> Tensor:
    count = words.shape[1] // segment
    columns = _multipliers(_COLUMNS, count, words.device)
    rows = max(1, _PIECE_BYTES // (8 * max(1, count)))
    sums = []
    for piece in words.split(rows) if len(words) > rows else (words,):
        parts = piece.long() if segment == 1 else piece.view(-1, count, segment).sum(2)
        # GPUs cannot multiply an integer matrix by a vector.
        sums.append(parts.mv(columns) if parts.is_cpu else (parts * columns).sum(1))
    return sums[0] if len(sums) == 1 else torch.cat(sums)


@functools.cache
def _segment(count: int) -> int:
    """Return the words per segment for rows of ``count`` words; 1 if rows are short or not divisible."""
    return next((size for size in range(16, 65) if count >= 64 and count % size == 0), 1)


def _words(tensor: Tensor) -> Tensor:
    """View the bits of ``tensor`` as a matrix of the widest integers that divide its rows."""
    tensor = tensor.detach()
    if not tensor.numel():
        return torch.zeros(1, 1, dtype=torch.int64, device=tensor.device)
    # Packed tensors, such as quantized weights, have no rows: bitsandbytes stores a column of single bytes.
    rows = tensor.dim() > 1 and tensor.is_floating_point()
    matrix = tensor.reshape(-1, tensor.shape[-1]) if rows else tensor.reshape(1, -1)
    matrix = matrix.contiguous()
    width = matrix.shape[1] * matrix.element_size()
    # Depend on the width alone, so that equal rows are read as equal words at any address.
    word = next(
        word for word in (torch.int64, torch.int32, torch.int16, torch.uint8) if width % word.itemsize == 0
    )
    if matrix.storage_offset() * matrix.element_size() % word.itemsize:
        matrix = matrix.clone()
    return matrix.view(word)


@functools.cache
def _table(stream: int, size: int) -> numpy.ndarray:
    """Return odd 64-bit numbers: SplitMix64 (doi 10.1145/2660193.2660195) of the position, made odd."""
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
    # Round sizes up to powers of two, so that a few tables serve all tensors.
    size = 2 ** math.ceil(math.log2(max(count, 1024)))
    return _on_device(stream, size, device)[:count]
