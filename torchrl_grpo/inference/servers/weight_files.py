"""Weights as files in shared memory or in a folder, which servers map into their memory.

A file is a bucket: tensors one after the other, without a header. What it contains travels beside it, in the
request that names it. The bytes are those of the tensors, so that every number format is possible.
"""

from __future__ import annotations

import fcntl
import math
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

# Largest size of a bucket in bytes. A single larger tensor has a bucket of its own.
BUCKET_BYTES = 64 * 2**20
# Every tensor starts at a multiple of this, which any number format can be read from.
_ALIGNMENT = 64
_PREFIX, _LOCK = "torchrl-grpo-", "lock"
# Age in seconds below which a folder without an owner is left alone.
_NEW_S = 60.0


@dataclass(frozen=True)
class Bucket:
    """One file of weights.

    Attributes:
        path: the file.
        tensors: name, dtype, shape and first byte of each tensor.
    """

    path: str
    tensors: tuple[tuple[str, str, tuple[int, ...], int], ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return asdict(self)

    @staticmethod
    def from_json(content: dict[str, Any]) -> Bucket:
        """Return the bucket that :meth:`to_json` was called on."""
        tensors = [(name, dtype, tuple(shape), start) for name, dtype, shape, start in content["tensors"]]
        return Bucket(content["path"], tuple(tensors))


def read_bucket(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a bucket. They lie in the mapped file, which may be deleted then."""
    size = Path(bucket.path).stat().st_size
    # A private mapping: whoever writes to a tensor changes a page of its own.
    content = torch.from_file(bucket.path, shared=False, size=size, dtype=torch.uint8)
    for name, kind, shape, start in bucket.tensors:
        dtype = getattr(torch, kind)
        stop = start + math.prod(shape) * dtype.itemsize
        yield name, content[start:stop].view(dtype).view(shape)


class WeightFiles:
    """The weights of one version in a folder of their own, which is deleted with this object.

    Args:
        parent: folder to create it in: ``/dev/shm``, or one that all servers see.
    """

    def __init__(self, parent: Path) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        # The kernel takes this lock back when the process ends, however it ends.
        lock = (self._folder / _LOCK).open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX)
        self._delete = weakref.finalize(self, _delete, self._folder, lock)
        self.buckets: list[Bucket] = []

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and tensors, which lie in the files."""
        for bucket in self.buckets:
            yield from read_bucket(bucket)

    def write(self, weights: Iterable[tuple[str, Tensor]]) -> WeightFiles:
        """Write tensors into buckets, and return this object.

        Raises:
            OSError: there is no room.
        """
        listed: list[tuple[str, Tensor]] = []
        size = 0
        for name, tensor in weights:
            room = -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
            if listed and size + room > BUCKET_BYTES:
                self._write_bucket(listed, size)
                listed, size = [], 0
            listed.append((name, tensor.detach()))
            size += room
        if listed:
            self._write_bucket(listed, size)
        return self

    def _write_bucket(self, tensors: Iterable[tuple[str, Tensor]], size: int) -> None:
        path = self._folder / str(len(self.buckets))
        # A bucket may hold empty tensors only, and an empty file cannot be mapped.
        size = max(size, _ALIGNMENT)
        with path.open("wb") as file:
            # Reserve the room. Without it, writing to a full file system through a mapping ends the process.
            os.posix_fallocate(file.fileno(), 0, size)
        content = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        start = 0
        entries = []
        for name, tensor in tensors:
            kind = str(tensor.dtype).removeprefix("torch.")
            entries.append((name, kind, tuple(tensor.shape), start))
            content[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            start += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.buckets.append(Bucket(str(path), tuple(entries)))

    def close(self) -> None:
        """Delete the files. Servers that have mapped one keep it until they have loaded it."""
        self._delete()


def _delete(folder: Path, lock: IO[bytes]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    lock.close()


def remove_abandoned(parent: Path) -> None:
    """Delete weights in ``parent`` whose process has ended without deleting them."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            with (folder / _LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # A folder that is being created may not be locked yet.
                if time.time() - folder.stat().st_mtime > _NEW_S:
                    shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            # It is in use, belongs to somebody else, or is being created or deleted.
            continue
