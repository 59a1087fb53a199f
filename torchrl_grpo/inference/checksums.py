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

The sum runs over words, so the checksum of a tensor is the sum of those of its parts. Ranks of an engine that
hold some rows or columns each compute :func:`part_checksum`, and :func:`merge_ranks` adds them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchrl_grpo.inference.noise import INCREMENT, mixed, signed

# Largest size in bytes of the temporary of a product.
_PIECE_BYTES = 2**26
_COLUMNS, _ROWS = 1, 2


@dataclass(frozen=True)
class Part:
    """Rows and columns of a published tensor, read as a matrix ``[rows, last dimension]``.

    Attributes:
        rows: first row, and the row after the last one.
        columns: first column, and the column after the last one.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def size(self) -> int:
        """Number of elements."""
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])


def whole(shape: Sequence[int]) -> Part:
    """Return the part that is all of a tensor; a vector is one row."""
    columns = shape[-1] if shape else 1
    rows = math.prod(shape[:-1]) if len(shape) > 1 else 1
    return Part((0, rows), (0, columns))


@dataclass(frozen=True)
class Checksums:
    """Checksums of the weights that an engine or the trainer holds.

    Attributes:
        dtype: data type that the tensors were read in.
        values: checksums by name of the published tensor, one for each copy that the engine computes with. A
            tensor that cannot be read has none.
        parts: checksums of parts of published tensors by name, if a rank of the engine holds parts only.
    """

    dtype: str
    values: dict[str, tuple[int, ...]]
    parts: dict[str, tuple[tuple[Part, int], ...]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return them as a JSON object."""
        values = {name: list(copies) for name, copies in self.values.items()}
        parts = {
            name: [[*part.rows, *part.columns, value] for part, value in held]
            for name, held in self.parts.items()
        }
        return {"dtype": self.dtype, "values": values, "parts": parts}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Checksums:
        """Return the checksums that :meth:`to_json` was called on."""
        values = {name: tuple(copies) for name, copies in content["values"].items()}
        parts = {
            name: tuple(
                (Part((top, bottom), (left, right)), value) for top, bottom, left, right, value in held
            )
            for name, held in content["parts"].items()
        }
        return Checksums(content["dtype"], values, parts)


def merge_ranks(ranks: Sequence[Checksums], shapes: Mapping[str, Sequence[int]]) -> Checksums:
    """Add the checksums of parts that the ranks of one engine hold.

    Args:
        ranks: checksums of each rank.
        shapes: shapes of the published tensors by name.

    Returns:
        The checksums of whole tensors. Several ranks may hold a copy of the same part. A tensor then has as
        many checksums as its most frequent part has copies, so that every copy is in at least one of them. A
        tensor has no checksum if the ranks together lack a part of it.
    """
    values: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        checksums = tuple(value for rank in ranks for value in rank.values.get(name, ()))
        copies: dict[Part, list[int]] = {}
        for rank in ranks:
            for part, value in rank.parts.get(name, ()):
                copies.setdefault(part, []).append(value)
        if copies and sum(part.size for part in copies) == whole(shape).size and not _overlap(list(copies)):
            for number in range(max(map(len, copies.values()))):
                total = sum(held[min(number, len(held) - 1)] for held in copies.values())
                checksums += (signed(total),)
        if checksums:
            values[name] = checksums
    return Checksums(ranks[0].dtype, values)


def _overlap(parts: Sequence[Part]) -> bool:
    return any(
        max(part.rows[0], other.rows[0]) < min(part.rows[1], other.rows[1])
        and max(part.columns[0], other.columns[0]) < min(part.columns[1], other.columns[1])
        for number, part in enumerate(parts)
        for other in parts[:number]
    )


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
    return collect_parts([(name, None, value) for name, value in sums], dtype)


def collect_parts(sums: Iterable[tuple[str, Part | None, Tensor]], dtype: torch.dtype) -> Checksums:
    """Collect checksums of tensors and of parts of tensors by name.

    Args:
        sums: names, parts (None for a whole tensor) and checksums, each a scalar on the device.
        dtype: data type of the tensors.
    """
    listed = list(sums)
    numbers = torch.stack([value for _, _, value in listed]).tolist() if listed else []
    values: dict[str, tuple[int, ...]] = {}
    parts: dict[str, tuple[tuple[Part, int], ...]] = {}
    for (name, part, _), number in zip(listed, numbers, strict=True):
        if part is None:
            values[name] = (*values.get(name, ()), number)
        else:
            parts[name] = (*parts.get(name, ()), (part, number))
    return Checksums(str(dtype).removeprefix("torch."), values, parts)


def checksum_tensor(tensor: Tensor) -> Tensor:
    """Compute the same checksum as :func:`checksum`, as an int64 scalar on the device.

    Rows run along the last dimension. A vector is one row.
    """
    return combine(row_sums(tensor))


def combine(sums: Tensor, first: int = 0) -> Tensor:
    """Combine the sums ``[R]`` of rows (see :func:`row_sums`) to a checksum, a scalar on the device.

    The result depends on the order of the rows.

    Args:
        sums: sums of adjacent rows.
        first: number of the first of them in the tensor.
    """
    return (sums * _multipliers(_ROWS, first + len(sums), sums.device)[first:]).sum()


def part_checksum(tensor: Tensor, part: Part, columns: int) -> Tensor | None:
    """Compute what a part adds to the checksum of its tensor, as an int64 scalar on the device.

    Args:
        tensor: the part ``[rows, columns]``, or a piece of a vector.
        part: where it lies in the whole tensor.
        columns: number of columns of the whole tensor.

    Returns:
        None if the part begins or ends inside a word, so that it has no checksum of its own.
    """
    size = tensor.element_size()
    word = _word(columns * size)
    start, stop = part.columns[0] * size, part.columns[1] * size
    if start % word.itemsize or stop % word.itemsize:
        return None
    words = tensor.detach().reshape(-1, tensor.shape[-1]).contiguous()
    if words.storage_offset() * size % word.itemsize:
        words = words.clone()
    words = words.view(word)
    count = columns * size // word.itemsize
    segment, first = _segment(count), start // word.itemsize
    if first % segment == 0 and words.shape[1] % segment == 0:
        sums = _weighted(words, segment, first // segment)
    else:
        places = torch.arange(first, first + words.shape[1], device=words.device) // segment
        factors = _multipliers(_COLUMNS, count // segment, words.device)[places]
        sums = (words.long() * factors).sum(1)
    return combine(sums, part.rows[0])


def row_sums(tensor: Tensor) -> Tensor:
    """Compute the sum ``[R]`` int64 of each row, weighted by segment, from which checksums are made."""
    words = _words(tensor)
    return _weighted(words, _segment(words.shape[1]))


def ordered_row_sums(tensor: Tensor) -> Tensor:
    """Compute a sum ``[R]`` int64 for each row that depends on the position of every word in the row."""
    return _weighted(_words(tensor), 1)


def ordered_column_sums(tensor: Tensor) -> Tensor:
    """Compute :func:`ordered_row_sums` of a tensor with its last two dimensions swapped.

    Columns are copied a few at a time, because the copy of a large embedding would not fit beside an engine.
    """
    width = max(1, _PIECE_BYTES * tensor.shape[-1] // max(1, tensor.nbytes))
    sums = [ordered_row_sums(columns.transpose(-1, -2)) for columns in tensor.split(width, -1)]
    if len(sums) == 1:
        return sums[0]
    return torch.cat([each.view(*tensor.shape[:-2], -1) for each in sums], -1).flatten()


def _weighted(words: Tensor, segment: int, first: int = 0) -> Tensor:
    count = words.shape[1] // segment
    columns = _multipliers(_COLUMNS, first + count, words.device)[first:]
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
    word = _word(matrix.shape[1] * matrix.element_size())
    if matrix.storage_offset() * matrix.element_size() % word.itemsize:
        matrix = matrix.clone()
    return matrix.view(word)


def _word(width: int) -> torch.dtype:
    # Depend on the width alone, so that equal rows are read as equal words at any address.
    words = (torch.int64, torch.int32, torch.int16, torch.uint8)
    return next(word for word in words if width % word.itemsize == 0)


@functools.cache
def _table(stream: int, size: int, device: torch.device) -> Tensor:
    """Return odd 64-bit numbers: SplitMix64 (doi 10.1145/2660193.2660195) of the position, made odd."""
    return (mixed((torch.arange(1, size + 1) + (stream << 40)) * INCREMENT) | 1).to(device)


@functools.cache
def _multipliers(stream: int, count: int, device: torch.device) -> Tensor:
    # Round sizes up to powers of two, so that a few tables serve all tensors.
    size = 2 ** math.ceil(math.log2(max(count, 1024)))
    return _table(stream, size, device)[:count]
