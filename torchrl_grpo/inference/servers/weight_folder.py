"""Weights in a folder that the trainer and servers on other machines see.

Each version has a folder of its own and names that were never used before, so that no machine has older
content in its cache. A file is written under another name, flushed to the storage and renamed. The request
that names it brings a checksum, and a server reads the file again until the checksum is right.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from torchrl_grpo.inference.checksums import checksum
from torchrl_grpo.inference.pieces import Piece
from torchrl_grpo.inference.servers import weight_files
from torchrl_grpo.inference.servers.weight_files import (
    Bucket,
    WeightFiles,
    divide,
    map_file,
    pack_pieces,
    read_bucket,
)
from torchrl_grpo.runtime.files.shared_files import open_regular

# Seconds within which a file must arrive on another machine. NFS keeps what it knows of a folder for a
# minute.
_LAG_S = 90.0
_AGAIN_S = 0.25
# Number of servers from which on files may be several times as large, and how many times at most. Each file
# costs the trainer a request to each server.
_MANY_SERVERS, _MOST_TIMES = 16, 4


class FolderWeights(WeightFiles):
    """One version of the weights, in a folder that all machines see under the same path.

    Args:
        parent: folder to create it in.
        servers: number of servers that load it.
    """

    def __init__(self, parent: Path, servers: int = 1) -> None:
        super().__init__(parent)
        times = min(_MOST_TIMES, max(1, servers // _MANY_SERVERS))
        self._most_bytes = times * weight_files.MOST_BYTES

    def write(self, weights: Iterable[tuple[str, Tensor]]) -> FolderWeights:
        """Write tensors into files, and return this object.

        Raises:
            OSError: the folder cannot be written to, or has no room.
        """
        buffer = torch.empty(weight_files.BUCKET_BYTES, dtype=torch.uint8)
        sizes = weight_files.BUCKET_BYTES, self._most_bytes, weight_files.PART_OF_FILES
        for number, pieces in enumerate(divide(weights, *sizes)):
            room = weight_files.room_for(pieces)
            if room > len(buffer):
                buffer = torch.empty(room, dtype=torch.uint8)
            path = self._folder.path / str(number)
            bucket = pack_pieces(pieces, buffer, path)
            content = buffer[:room]
            partial = path.with_suffix(".part")
            with partial.open("wb") as file:
                content.numpy().tofile(file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            self._buckets.append(replace(bucket, size=room, checksum=checksum(content)))
        return self


class BucketReader:
    """Reads buckets that lie in shared memory or in a folder. Files in shared memory are mapped once."""

    def __init__(self) -> None:
        # By path: the inode number of the file, and its mapped content.
        self._mapped: dict[str, tuple[int, Tensor]] = {}

    def read(self, bucket: Bucket) -> Iterator[Piece]:
        """Yield the pieces in a bucket. They may change once they are loaded."""
        return read_bucket(
            bucket, self._mapped_file(bucket.path) if bucket.checksum is None else read_file(bucket)
        )

    def _mapped_file(self, path: str) -> Tensor:
        number = Path(path).stat().st_ino
        if path not in self._mapped or self._mapped[path][0] != number:
            self._mapped[path] = number, map_file(Path(path))
        return self._mapped[path][1]


def read_file(bucket: Bucket) -> Tensor:
    """Return the content of a file of another machine, which must have the checksum of its bucket.

    Raises:
        TimeoutError: the file does not arrive, or not as a whole.
    """
    deadline = time.monotonic() + _LAG_S
    while True:
        content = _read(Path(bucket.path), bucket.size)
        if len(content) == bucket.size and checksum(content) == bucket.checksum:
            return content
        if time.monotonic() > deadline:
            what = f"has {len(content)} bytes" if len(content) != bucket.size else "has other content"
            raise TimeoutError(
                f"{bucket.path} should have {bucket.size} bytes of weights, and {what} after {_LAG_S:g} s"
            )
        # Nobody tells this machine when a file of another one arrives.
        time.sleep(_AGAIN_S)


def _read(path: Path, size: int) -> Tensor:
    try:
        with os.fdopen(open_regular(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            # One byte more shows that it is another file.
            content = bytearray(file.read(size + 1))
    except FileNotFoundError:
        content = bytearray()
    return torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
