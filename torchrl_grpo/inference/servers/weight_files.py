"""Weights as files in shared memory or in a folder, which servers map into their memory.

A file contains pieces of tensors, one after the other and without a header. A :class:`Bucket` says what is in
the file; the request that names the file carries it. The bytes are identical to those of the tensors, so
every number format is possible.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchrl_grpo.inference.pieces import Assembler, Piece
from torchrl_grpo.inference.servers.transfer_types import Opening
from torchrl_grpo.runtime.files import shared_files

# Size in bytes of a transfer buffer with its two halves (one is filled while the other is read), and of a
# file. Larger tensors are divided.
BUCKET_BYTES = 64 * 2**20
# Size that a half or a file grows to if there are many. Each costs a request to each server.
MOST_BYTES = 512 * 2**20
# A half is at most this part of the weights before it, so that little time is lost at the end, when servers
# load and nothing is written.
_PART = 16
# The same for files, all of which are written before a server loads the first. Small models get small ones,
# because a server on another machine has a whole file in its memory.
PART_OF_FILES = 2
# Every tensor starts at a multiple of this, which any number format can be read from.
_ALIGNMENT = 64
_PREFIX = "torchrl-grpo-"


@dataclass(frozen=True)
class Bucket:
    """The content of one file of weights, or of one half of a transfer buffer in GPU memory.

    Attributes:
        path: the file; empty for a half in GPU memory.
        entries: for each piece: name of the tensor, dtype, shape of the whole tensor, position of the first
            byte in the file or half, number of the first element in the tensor, and number of elements.
        size: number of bytes, if the checksum is given.
        checksum: checksum of the bytes; None for a file in the memory of this machine.
        slot: number of the half in GPU memory; None for a file.
    """

    path: str
    entries: tuple[tuple[str, str, tuple[int, ...], int, int, int], ...]
    size: int = 0
    checksum: int | None = None
    slot: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return asdict(self)

    @staticmethod
    def from_json(content: dict[str, Any]) -> Bucket:
        """Return the bucket that :meth:`to_json` was called on."""
        entries = [(name, dtype, tuple(shape), *rest) for name, dtype, shape, *rest in content["entries"]]
        return Bucket(content["path"], tuple(entries), content["size"], content["checksum"], content["slot"])


def read_bucket(bucket: Bucket, content: Tensor | None = None) -> Iterator[Piece]:
    """Yield the pieces in a bucket. They share memory with its content.

    A mapped file may be deleted before the pieces are loaded.

    Args:
        bucket: the bucket.
        content: bytes of the file or half; None maps the file.
    """
    if content is None:
        content = map_file(Path(bucket.path), own=bucket.checksum is None)
    for name, kind, shape, start, first, count in bucket.entries:
        dtype = getattr(torch, kind)
        yield Piece(name, shape, first, content[start : start + count * dtype.itemsize].view(dtype))


def map_file(path: Path, *, own: bool = True) -> Tensor:
    """Map a file into memory. Writing to the result changes the file.

    Args:
        path: the file.
        own: whether it must belong to this user. Where other machines write, users have other numbers.

    Raises:
        OSError: there is no such file, or it is no regular one.
    """
    file = shared_files.open_regular(path, os.O_RDWR, own=own)
    try:
        # By its descriptor, because another file may have got its name.
        size = os.fstat(file).st_size
        return torch.from_file(f"/proc/self/fd/{file}", shared=True, size=size, dtype=torch.uint8)
    finally:
        os.close(file)


def whole_tensors(buckets: Iterable[Bucket]) -> Iterator[tuple[str, Tensor]]:
    """Yield names and whole tensors, assembled from their pieces in files."""
    assembler = Assembler()
    for bucket in buckets:
        yield from assembler.take(read_bucket(bucket))


def divide(
    weights: Iterable[tuple[str, Tensor]], room: int, most_room: int | None = None, part: int = _PART
) -> Iterator[list[Piece]]:
    """Divide tensors into lists of pieces that fit into a number of bytes each.

    A tensor is cut between two rows. A row that is longer than the room gets a list of its own.

    Args:
        weights: names and tensors.
        room: number of bytes of the first list. It is doubled when it is then at most ``1 / part`` of the
            lists before.
        most_room: number of bytes that it stays below; None for ``room``.
        part: see ``room``.
    """
    pieces: list[Piece] = []
    free, before = room, 0
    for name, tensor in weights:
        content = tensor.detach().reshape(-1)
        row = tensor.shape[-1] if tensor.dim() > 1 else 1
        first = 0
        while first < len(content) or (first == 0 and not len(content)):
            rows = free // (row * tensor.itemsize) if row else 0
            if pieces and rows < 1:
                yield pieces
                before += room - free
                while 2 * room <= min(before // part, most_room or room):
                    room *= 2
                pieces, free = [], room
                continue
            count = min(len(content) - first, max(1, rows) * row)
            pieces.append(Piece(name, tuple(tensor.shape), first, content[first : first + count]))
            free -= -(-count * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT
            first += count
            if not count:
                break
    if pieces:
        yield pieces


class Segment:
    """A file of weights that is overwritten again and again, so that its memory pages are reused.

    Args:
        path: the file, which is created.
        size: its size in bytes.

    Raises:
        OSError: there is no room.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        # A server may have mapped an earlier file of this name.
        path.unlink(missing_ok=True)
        with path.open("wb") as file:
            # Reserve the room. Without it, writing to a full file system through a mapping ends the process.
            os.posix_fallocate(file.fileno(), 0, size)
        self._content = map_file(path)

    def write(self, pieces: Iterable[Piece]) -> Bucket:
        """Write pieces from the beginning of the file on, over what was there."""
        return pack_pieces(pieces, self._content, self.path)


def pack_pieces(pieces: Iterable[Piece], content: Tensor, path: Path | None) -> Bucket:
    """Copy pieces into bytes, and return the bucket that describes them.

    Args:
        pieces: the pieces.
        content: bytes, at least :func:`room_for` the pieces.
        path: file that has these bytes; None if they lie in no file.
    """
    start, entries = 0, []
    for piece in pieces:
        source = piece.content
        size = source.nbytes
        content[start : start + size].view(source.dtype).copy_(source)
        kind = str(source.dtype).removeprefix("torch.")
        entries.append((piece.name, kind, tuple(piece.shape), start, piece.first, len(source)))
        start += -(-size // _ALIGNMENT) * _ALIGNMENT
    return Bucket("" if path is None else str(path), tuple(entries))


def room_for(pieces: Iterable[Piece]) -> int:
    """Return the number of bytes that pieces take in a file.

    The minimum is ``_ALIGNMENT``, because an empty file cannot be mapped.
    """
    return max(_ALIGNMENT, sum(-(-piece.content.nbytes // _ALIGNMENT) * _ALIGNMENT for piece in pieces))


class Folder(shared_files.Folder):
    """A folder for weights.

    Args:
        parent: folder to create it in, e.g. ``/dev/shm``.
    """

    def __init__(self, parent: Path) -> None:
        super().__init__(parent, _PREFIX)


class BucketSource(ABC):
    """Weights that are read bucket by bucket, from files or from the halves of a transfer buffer.

    Attributes:
        shares_cpu: whether the trainer's CPU writes one file while the servers' CPU loads another.
    """

    shares_cpu = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and whole tensors of a pass through files."""
        return whole_tensors(item for item in self.buckets() if isinstance(item, Bucket))

    @abstractmethod
    def buckets(self) -> Generator[Bucket | Opening | None]:
        """Yield the buckets of one pass, and before the first one what the server must open, if anything.

        A half in GPU memory may be overwritten as soon as the next bucket is requested. A file may be
        overwritten as soon as the bucket after the next one is requested. None tells the reader to finish
        loading everything that it has before it asks again. Closing the generator ends the pass early, and
        the content of every bucket may then be overwritten.
        """


class WeightFiles(BucketSource):
    """The weights of one version in a folder of their own, which is deleted with this object.

    Args:
        parent: folder to create it in.
    """

    def __init__(self, parent: Path) -> None:
        self._folder = Folder(parent)
        self._segments: list[Segment] = []
        self._buckets: list[Bucket] = []

    def write(self, weights: Iterable[tuple[str, Tensor]]) -> WeightFiles:
        """Write tensors into buckets, over those of an earlier call, and return this object.

        Raises:
            OSError: there is no room.
        """
        self._buckets = []
        for number, pieces in enumerate(divide(weights, BUCKET_BYTES, MOST_BYTES, PART_OF_FILES)):
            room = room_for(pieces)
            if number == len(self._segments):
                self._segments.append(Segment(self._folder.path / str(number), room))
            elif self._segments[number].size < room:
                self._segments[number] = Segment(self._folder.path / str(number), room)
            self._buckets.append(self._segments[number].write(pieces))
        return self

    def buckets(self) -> Generator[Bucket]:
        """Yield the buckets."""
        yield from self._buckets

    def close(self) -> None:
        """Delete the files. Servers that have mapped one keep it until they have loaded it."""
        self._folder.close()


def remove_abandoned(parent: Path) -> None:
    """Delete weights in ``parent`` whose process has ended without deleting them."""
    shared_files.remove_abandoned(parent, _PREFIX)
