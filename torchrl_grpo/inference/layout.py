"""Learns once, from fingerprints, which rows of which engine tensor hold each published tensor.

An engine may fuse matrices, reorder heads, tie, pad or transpose. Instead of modeling that for each
architecture, this module makes the engine load fingerprints: random numbers with distinct rows. It then
searches the engine's tensors for these rows, because the weights will be in the same places. It cannot find a
tensor that the engine splits over several of its own tensors or transforms, and reports such a tensor.

An engine on several devices may give each rank some rows or some columns of a tensor. The search then finds
the rank's part.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from torchrl_grpo.inference.checksums import (
    Part,
    checksum_tensor,
    combine,
    ordered_column_sums,
    ordered_row_sums,
    part_checksum,
    row_sums,
    whole,
)

Shape = tuple[int, ...]

# Shorter vectors would often match by chance.
_LEAST_BYTES = 8
_CHUNKS = (64, 32, 16, 8, 4)
# Elements per piece by which an incomplete vector is recognized.
_PIECE = 4
# (bits of the integer of the same width, bias of the exponent, bits of the fraction)
_FORMATS = {
    torch.float32: (torch.int32, 127, 23),
    torch.bfloat16: (torch.int16, 127, 7),
    torch.float16: (torch.int16, 15, 10),
}


def fingerprint(
    name: str, shape: Shape, dtype: torch.dtype, device: torch.device, other: bool = False
) -> Tensor:
    """Return random numbers from 2^-7 to 2^7, with every bit pattern equally likely.

    Name and shape determine the numbers. ``other`` selects a second, different fingerprint.
    """
    word, bias, fraction = _FORMATS[dtype]
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()) + int(other))
    low, high = (bias - 7) << fraction, (bias + 7) << fraction
    return torch.randint(low, high, shape, generator=generator, device=device, dtype=word).view(dtype)


@dataclass
class Seen:
    """An engine tensor that was loaded with fingerprints.

    Attributes:
        rows: sums ``[R]`` of its rows, from :func:`ordered_row_sums`.
        transposed: row sums of the tensor with its last two dimensions swapped; None for a vector.
        content: bytes of a vector; empty for other tensors.
        itemsize: bytes per element.
    """

    rows: Tensor
    transposed: Tensor | None
    content: bytes
    itemsize: int

    @classmethod
    def of(cls, tensor: Tensor) -> Seen:
        """Record ``tensor``, which has the dtype of the fingerprints."""
        if tensor.dim() < 2:
            content = tensor.detach().reshape(-1).contiguous().view(torch.uint8).cpu().numpy().tobytes()
            return cls(ordered_row_sums(tensor), None, content, tensor.element_size())
        return cls(ordered_row_sums(tensor), ordered_column_sums(tensor), b"", tensor.element_size())


@dataclass(frozen=True)
class Place:
    """Where an engine tensor holds a published tensor, or a part of it.

    Attributes:
        name: name of the published tensor.
        where: indices of rows of the engine tensor (of elements of a vector), in the order of the published
            tensor.
        vector: whether the published tensor has one dimension.
        transposed: whether the engine swaps the last two dimensions.
        part: rows and columns that are there; None for the whole tensor.
    """

    name: str
    where: slice | Tensor
    vector: bool
    transposed: bool = False
    part: Part | None = None


@dataclass
class Layout:
    """Locations of the published tensors in the tensors of an engine.

    Attributes:
        dtype: data type of the engine.
        places: published tensors that each engine tensor holds, by key of the engine tensor.
        torn: names of published tensors that were found only in part: some rows, or some pieces of a vector,
            were found and others were not.
        shapes: shapes of the published tensors by name.
    """

    dtype: torch.dtype
    places: dict[str, list[Place]] = field(default_factory=dict)
    torn: list[str] = field(default_factory=list)
    shapes: Mapping[str, Shape] = field(default_factory=dict)

    def unreadable(self, names: Iterable[str]) -> list[str]:
        """Return those of ``names`` that no engine tensor holds."""
        known = {place.name for places in self.places.values() for place in places}
        return [name for name in names if name not in known]

    def read_parts(self, key: str, tensor: Tensor) -> Iterator[tuple[str, Part | None, Tensor]]:
        """Yield names, parts and checksums of what an engine tensor holds; None is a whole tensor."""
        places = self.places.get(key)
        if places is None:
            return
        tensor = in_format(tensor, self.dtype)
        # By whether the last two dimensions are swapped: the sums of the rows of the engine tensor.
        sums_of: dict[bool, Tensor] = {}
        for place in places:
            if place.part is not None:
                rows = tensor.reshape(-1, 1 if place.vector else tensor.shape[-1])[place.where]
                columns = whole(self.shapes[place.name]).columns[1]
                value = part_checksum(rows.flatten() if place.vector else rows, place.part, columns)
                if value is not None:
                    yield place.name, place.part, value
                continue
            if place.vector:
                yield place.name, None, checksum_tensor(tensor.reshape(-1)[place.where])
                continue
            swapped = place.transposed
            if swapped not in sums_of:
                sums_of[swapped] = row_sums(tensor.transpose(-1, -2) if swapped else tensor)
            yield place.name, None, combine(sums_of[swapped][place.where])


def readable(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield keys and tensors of the nonempty parameters and buffers, each storage once."""
    known = set()
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if tensor.numel() and tensor.is_floating_point() and tensor.data_ptr() not in known:
            known.add(tensor.data_ptr())
            yield name, tensor


def in_format(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast ``tensor`` to ``dtype``, with NaN for values that ``dtype`` cannot represent.

    An engine keeps some tensors in float32 for any model dtype. Their values were published in ``dtype``,
    so the cast is exact unless the engine changed them.
    """
    if tensor.dtype is dtype:
        return tensor
    cast = tensor.to(dtype)
    return torch.where(cast.to(tensor.dtype) == tensor, cast, torch.nan)


def locate_weights(
    shapes: Mapping[str, Shape],
    dtype: torch.dtype,
    seen: Mapping[str, Seen],
    device: torch.device,
    shards: int = 1,
) -> Layout:
    """Find every fingerprint in the tensors of an engine, or of one rank of an engine.

    Args:
        shapes: shapes of the published tensors by name.
        dtype: data type of the fingerprints.
        seen: records of the engine's tensors by key.
        device: device on which the fingerprints were made.
        shards: number of ranks that share a matrix. With several, a part of a tensor is found too.
    """
    layout = Layout(dtype, shapes=dict(shapes))
    vectors = {name: shape for name, shape in shapes.items() if len(shape) < 2}
    matrices = {name: shape for name, shape in shapes.items() if len(shape) > 1}
    _find_rows(matrices, seen, layout, device, shards)
    for name, shape in vectors.items():
        _find_vector(name, fingerprint(name, shape, dtype, device), seen, layout)
    if shards > 1:
        for name in layout.unreadable(shapes):
            print_ = fingerprint(name, shapes[name], dtype, device)
            if name in vectors:
                _find_piece_of_vector(name, print_, seen, layout, shards)
            else:
                _find_columns(name, print_, seen, layout, shards)
    unreadable = set(layout.unreadable(shapes))
    layout.torn = [name for name in layout.torn if name in unreadable]
    return layout


def _find_rows(
    shapes: Mapping[str, Shape],
    seen: Mapping[str, Seen],
    layout: Layout,
    device: torch.device,
    shards: int,
) -> None:
    names = list(shapes)
    if not names:
        return
    sums = [ordered_row_sums(fingerprint(name, shapes[name], layout.dtype, device)) for name in names]
    counts = torch.tensor([len(tensor_sums) for tensor_sums in sums])
    owner = torch.arange(len(names)).repeat_interleave(counts).to(device)
    row = torch.cat([torch.arange(count) for count in counts.tolist()]).to(device)
    known, order = torch.cat(sums).sort()
    owner, row = owner[order], row[order]
    is_found = torch.zeros_like(known, dtype=torch.bool)
    for key, record in seen.items():
        for transposed, held_sums in ((False, record.rows), (True, record.transposed)):
            if held_sums is None or record.content:
                continue
            at = torch.searchsorted(known, held_sums).clamp(max=len(known) - 1)
            hits = known[at] == held_sums
            is_found[at[hits]] = True
            for number in owner[at[hits]].unique().tolist():
                inside = (hits & (owner[at] == number)).nonzero().flatten()
                place, order_of_rows = row[at[inside]].sort()
                complete = len(place) == counts[number]
                if (complete or (shards > 1 and not transposed)) and bool((place.diff() == 1).all()):
                    where = _run(inside[order_of_rows])
                    part = None
                    if not complete:
                        part = Part((int(place[0]), int(place[-1]) + 1), (0, shapes[names[number]][-1]))
                    found_place = Place(names[number], where, False, transposed, part)
                    layout.places.setdefault(key, []).append(found_place)
    # A narrow matrix may have equal rows. The search finds only the first of several equal rows, so give the
    # others the same mark.
    is_found = is_found[torch.searchsorted(known, known)]
    with_found, with_missing = (set(owner[rows].unique().tolist()) for rows in (is_found, ~is_found))
    layout.torn += [names[number] for number in sorted(with_found & with_missing)]


def _find_vector(name: str, vector: Tensor, seen: Mapping[str, Seen], layout: Layout) -> None:
    sent = Seen.of(vector)
    size, length, is_found = sent.itemsize, len(sent.content), False
    for key, record in seen.items():
        if not record.content:
            continue
        if length < _LEAST_BYTES:
            # The vector is too short to be recognized by its content, so match it by its name.
            if key.partition(":")[0] == name and len(record.content) == length:
                is_found = True
                layout.places.setdefault(key, []).append(Place(name, slice(0, length // size), True))
            continue
        where = _find(sent.content, record.content, size)
        if where is None:
            # With heads in another order, the pieces are in other places.
            pieces = next(
                (c for c in _CHUNKS if (length // size) % c == 0 and c * size >= _LEAST_BYTES), None
            )
            where = None if pieces is None else _find_pieces(sent.content, record.content, size, pieces)
        if where is not None:
            layout.places.setdefault(key, []).append(Place(name, _run(where), True))
            is_found = True
    if not is_found and _is_there_in_part(sent.content, max(_PIECE * size, _LEAST_BYTES), size, seen):
        layout.torn.append(name)


def _find_columns(name: str, matrix: Tensor, seen: Mapping[str, Seen], layout: Layout, shards: int) -> None:
    """Find some columns of all rows of a matrix."""
    rows = matrix.reshape(-1, matrix.shape[-1])
    count, width = rows.shape
    if width % shards:
        return
    step = width // shards
    for number in range(shards):
        known = ordered_row_sums(rows[:, number * step : (number + 1) * step].contiguous())
        ordered, order = known.sort()
        for key, record in seen.items():
            if record.content or len(record.rows) < count:
                continue
            at = torch.searchsorted(ordered, record.rows).clamp(max=count - 1)
            inside = (ordered[at] == record.rows).nonzero().flatten()
            place, order_of_rows = order[at[inside]].sort()
            if len(place) == count and bool((place.diff() == 1).all()):
                part = Part((0, count), (number * step, (number + 1) * step))
                where = _run(inside[order_of_rows])
                layout.places.setdefault(key, []).append(Place(name, where, False, part=part))


def _find_piece_of_vector(
    name: str, vector: Tensor, seen: Mapping[str, Seen], layout: Layout, shards: int
) -> None:
    """Find the piece of a vector that a rank holds.

    If several ranks hold the same heads, the vector has fewer pieces than there are ranks. So smaller numbers
    of pieces are tried too.
    """
    sent = Seen.of(vector)
    length = len(vector)
    for pieces in range(shards, 1, -1):
        if shards % pieces or length % pieces or length // pieces * sent.itemsize < _LEAST_BYTES:
            continue
        step, is_found = length // pieces, False
        for number in range(pieces):
            piece = sent.content[number * step * sent.itemsize : (number + 1) * step * sent.itemsize]
            for key, record in seen.items():
                where = _find(piece, record.content, sent.itemsize) if record.content else None
                if where is not None:
                    part = Part((0, 1), (number * step, (number + 1) * step))
                    layout.places.setdefault(key, []).append(Place(name, _run(where), True, part=part))
                    is_found = True
        if is_found:
            return


def _is_there_in_part(content: bytes, step: int, size: int, seen: Mapping[str, Seen]) -> bool:
    """Return whether an engine's vectors hold some pieces of ``step`` bytes but not all of them."""
    if len(content) < step:
        return False
    last = len(content) - step
    pieces = {content[start : start + step] for start in (*range(0, last, step), last)}
    held = [
        any(_find(piece, record.content, size) is not None for record in seen.values()) for piece in pieces
    ]
    return any(held) and not all(held)


def _find(piece: bytes, content: bytes, size: int) -> Tensor | None:
    at = content.find(piece)
    while at >= 0 and at % size:
        at = content.find(piece, at + 1)
    return None if at < 0 else torch.arange(at // size, (at + len(piece)) // size)


def _find_pieces(vector: bytes, content: bytes, size: int, length: int) -> Tensor | None:
    step = length * size
    places = [_find(vector[start : start + step], content, size) for start in range(0, len(vector), step)]
    known = [place for place in places if place is not None]
    return torch.cat(known) if len(known) == len(places) else None


def _run(indices: Tensor) -> slice | Tensor:
    """Return a slice if the indices are consecutive, else the indices."""
    if len(indices) and bool((indices.diff() == 1).all()):
        return slice(int(indices[0]), int(indices[-1]) + 1)
    return indices
