"""What lies in shared memory, and which processes use it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path("/dev/shm")
# How Python names the segments of its processes, and how vLLM names those of an engine's ranks.
_SEGMENTS = ("psm_", "vllm_dist_")


def abandoned() -> set[str]:
    """Return the names in shared memory that no process uses; those of other users count as unused."""
    # Semaphores of other programs come and go there, and are not mapped under their name.
    there = {path.name for path in ROOT.iterdir() if not path.name.startswith("sem.")}
    return there - {name for process in _processes() for name in _used(process)}


def segments_of(group: int) -> set[str]:
    """Return the names of the segments that the processes of a process group use."""
    members = (process for process in _processes() if _group_of(process) == group)
    return {name for process in members for name in _used(process) if name.startswith(_SEGMENTS)}


def unlink(names: Iterable[str]) -> None:
    """Delete segments, for processes that are killed and cannot do it themselves.

    Processes that use a segment keep it until they end.
    """
    for name in names:
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
    names: set[str] = set()
    with contextlib.suppress(OSError):
        for line in (process / "maps").read_text().splitlines():
            _, root, name = line.partition(f"{ROOT}/")
            names |= {name.partition("/")[0].removesuffix(" (deleted)")} if root else set()
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                _, root, name = str(descriptor.readlink()).partition(f"{ROOT}/")
                names |= {name.partition("/")[0].removesuffix(" (deleted)")} if root else set()
    return names
