"""What lies in shared memory, and which processes use it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/dev/shm")
# How Python names the segments of its processes.
_SEGMENT = "psm_"


def abandoned() -> set[str]:
    """Return the names in shared memory that no process uses."""
    # Semaphores of other programs come and go there, and are not mapped under their name.
    there = {path.name for path in ROOT.iterdir() if not path.name.startswith("sem.")}
    return there - {name for process in _processes() for name in _used(process)}


def unlink_segments(group: int) -> None:
    """Delete the segments of a process group that is about to be killed, and so cannot do it itself.

    Processes that use a segment keep it until they end.

    Args:
        group: number of the process group.
    """
    for process in _processes():
        if _group_of(process) == group:
            for name in _used(process):
                if name.startswith(_SEGMENT):
                    (ROOT / name).unlink(missing_ok=True)


def _processes() -> Iterator[Path]:
    return Path("/proc").glob("[0-9]*")


def _group_of(process: Path) -> int | None:
    with contextlib.suppress(OSError):
        # The name of the program is in parentheses and may hold spaces. State, parent and group follow it.
        return int((process / "stat").read_text().rpartition(")")[2].split()[2])
    return None


def _used(process: Path) -> set[str]:
    """Return the names that a process has mapped or open; empty if it has ended or is somebody else's."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        for line in (process / "maps").read_text().splitlines():
            _, root, name = line.partition(f"{ROOT}/")
            found |= {name.partition("/")[0].removesuffix(" (deleted)")} if root else set()
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                _, root, name = str(descriptor.readlink()).partition(f"{ROOT}/")
                found |= {name.partition("/")[0].removesuffix(" (deleted)")} if root else set()
    return found
