"""Bring the memory of a process that has waited back to the state of a busy one."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import numpy as np

_AT_ONCE = 2**20


def touch_memory() -> int:
    """Read every page that this process has in memory, and return the number of bytes.

    The host of a virtual machine takes away pages that were not used for some minutes. Returning them takes
    time that no counter of the machine shows: a step of 33 s took 37 to 40 s after 130 s of waiting. This
    would favor the slower side, because the faster side waits longer. A run without a second side does not
    have this cost.
    """
    try:
        with (
            open("/proc/self/pagemap", "rb", buffering=0) as pages,
            open("/proc/self/mem", "rb", buffering=0) as memory,
        ):
            return sum(_touch(span, pages, memory) for span in _written_to())
    except OSError:
        # Not every kernel has these files, and another thread may have just freed memory.
        return 0


def _written_to() -> Iterator[tuple[int, int]]:
    """Yield start and end addresses of private memory (heaps, stacks, weights), except device mappings."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, _, _, _, *path = line.split()
        if permissions == "rw-p" and not (path and path[0].startswith("/dev/")):
            start, stop = (int(end, 16) for end in span.split("-"))
            yield start, stop


def _touch(span: tuple[int, int], pages: FileIO, memory: FileIO) -> int:
    size, (start, stop) = mmap.PAGESIZE, span
    pages.seek(start // size * 8)
    entries = np.frombuffer(pages.read((stop - start) // size * 8), dtype=np.uint64)
    # Bit 63 is set for pages in memory. Reading other pages would only allocate pages of zeros.
    present = np.flatnonzero(entries >> np.uint64(63))
    if not len(present):
        return 0
    for run in np.split(present, np.flatnonzero(np.diff(present) != 1) + 1):
        memory.seek(start + int(run[0]) * size)
        left = len(run) * size
        while left and (block := memory.read(min(left, _AT_ONCE))):
            left -= len(block)
    return len(present) * size
