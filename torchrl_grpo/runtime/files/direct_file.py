"""Writes large files past the page cache, so that training beside it keeps the cores."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

import xxhash

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Bytes written at a time: few enough for a processor's cache, and enough to keep a remote file system busy.
_BLOCK = 2**22
# Direct writes begin and end at whole pages, in memory and in the file.
_PAGE = 2**12
_DIRECT = os.O_DIRECT if sys.platform == "linux" else 0
# How file systems say that they cannot write past the page cache.
_CANNOT = (errno.EINVAL, errno.EOPNOTSUPP)
# Bytes a second. What waits for a slower disk waits less for the page cache, at the cost of processor time.
_SLOW = 250e6
# Bytes of which the fastest block is compared with that. The others may have waited for a core.
_JUDGED = 4 * _BLOCK


class Written(NamedTuple):
    """What was written to a file.

    Attributes:
        size: bytes.
        checksum: their XXH3, 64 bits in hexadecimal.
    """

    size: int
    checksum: str


class DirectFile:
    """A file that is written from its beginning to its end, and summed meanwhile.

    Python's lock is free while data is copied, summed and written. A file system that cannot write past the
    page cache writes through it, and so does a slow disk.

    Args:
        path: the file, which is replaced if it exists.

    Raises:
        OSError: the file cannot be written. At the end of a ``with`` it takes the place of another exception,
            because libraries report it in words of their own.
    """

    def __init__(self, path: Path) -> None:
        # Commands that write nothing import this module, and need no numpy.
        import numpy as np

        self._memory = memoryview(mmap.mmap(-1, _BLOCK))
        self._block: NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8)
        self._filled = self._size = 0
        self._fastest = 0.0
        self._hasher = xxhash.xxh3_64()
        self._error: OSError | None = None
        self._descriptor = _open(path)

    @property
    def written(self) -> Written:
        """What was written, once the file is closed."""
        return Written(self._size, self._hasher.hexdigest())

    def write(self, data: bytes | memoryview | NDArray[np.uint8]) -> int:
        """Append bytes, and return their number."""
        import numpy as np

        rest = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
        size = rest.size
        while rest.size:
            part, rest = np.split(rest, [_BLOCK - self._filled])
            self._block[self._filled : self._filled + part.size] = part
            self._filled += part.size
            if self._filled == _BLOCK:
                self._empty()
        return size

    def flush(self) -> None:
        """Do nothing; ``torch.save`` calls it. What fills no block is written at the end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._empty()
        finally:
            os.close(self._descriptor)
        if self._error is not None and error is not self._error and isinstance(error, Exception):
            raise self._error from error

    def _empty(self) -> None:
        """Write what the block holds."""
        content = self._memory[: self._filled]
        self._hasher.update(content)
        self._filled = 0
        try:
            while content:
                content = content[self._put(content) :]
        except OSError as error:
            self._error = error
            raise

    def _put(self, content: memoryview) -> int:
        """Write some of the content, and return the number of bytes."""
        whole, started = len(content) - len(content) % _PAGE, time.perf_counter()
        try:
            count = os.write(self._descriptor, content[: whole or None])
        except OSError as error:
            if error.errno not in _CANNOT or not _is_direct(self._descriptor):
                raise
            # The end of the file is no whole page, or this file system writes in larger units.
            _write_through_cache(self._descriptor)
            return 0
        self._size += count
        self._fastest = max(self._fastest, count / (time.perf_counter() - started))
        if self._size % _JUDGED == 0:
            if self._fastest < _SLOW:
                _write_through_cache(self._descriptor)
            self._fastest = 0.0
        return count


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        return os.open(path, flags | _DIRECT, 0o666)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
        return os.open(path, flags, 0o666)


def _is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & _DIRECT)


def _write_through_cache(descriptor: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~_DIRECT)
