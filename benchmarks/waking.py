"""Memory of a process that has waited, made as near as that of one that works."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

_AT_ONCE = 2**20


def touch_memory() -> int:
    """Read every page that this process has in memory, and return how many bytes that were.

    The host of a virtual machine takes pages away that nobody has used for some minutes, and no counter of
    the machine shows the time that it takes to give them back: a step of 33 s took 37 to 40 s after 130 s of
    waiting. The faster side waits longer and has less to divide that by; a run on its own has none of it.
    """
    size = mmap.PAGESIZE
    buffer = bytearray(_AT_ONCE)
    total = 0
    with (
        open("/proc/self/pagemap", "rb", buffering=0) as pages,
        open("/proc/self/mem", "rb", buffering=0) as memory,
    ):
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, permissions, _, _, _, *path = line.split()
            # Private and written to: heaps, stacks and weights. What a device maps cannot be read like this.
            if permissions != "rw-p" or (path[:1] and path[0].startswith("/dev/")):
                continue
            start, stop = (int(end, 16) for end in span.split("-"))
            pages.seek(start // size * 8)
            entries = np.frombuffer(pages.read((stop - start) // size * 8), dtype=np.uint64)
            # Bit 63: in memory. Reading others would only have pages of zeros made.
            present = np.flatnonzero(entries >> np.uint64(63))
            for run in np.split(present, np.flatnonzero(np.diff(present) != 1) + 1):
                address, left = start + int(run[0]) * size if len(run) else start, len(run) * size
                while left:
                    memory.seek(address)
                    read = memory.readinto(memoryview(buffer)[: min(left, _AT_ONCE)])
                    address, left, total = address + read, left - read, total + read
    return total
