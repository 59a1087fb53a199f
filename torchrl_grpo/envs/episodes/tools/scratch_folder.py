"""A folder of the ``python`` or the ``shell`` tool: it is locked while it is in use, and removed afterwards.

The kernel releases the lock when its process ends in any way, so folders that nobody removed are found. Only
the standard library is imported.
"""

from __future__ import annotations

import fcntl
import itertools
import math
import os
import time

_PREFIX = "grpo-python-"
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def create(parent: str) -> tuple[str, int]:
    """Create an empty folder.

    Returns:
        Its path, and a file descriptor. The folder is in use until each process that has this has closed it.
    """
    while True:
        path = f"{parent}/{_PREFIX}{os.urandom(8).hex()}"
        os.mkdir(path, 0o700)
        try:
            return path, _lock(path, fcntl.LOCK_SH)
        except (BlockingIOError, FileNotFoundError):
            # Another process has taken it for an abandoned one, before it was locked.
            continue


def measure(path: str) -> tuple[int, int, int]:
    """Return the number of files in a folder, that of folders, and the bytes that they take.

    Folders in it are made readable, and links are not followed.
    """
    counts = [0, 0, 0]
    pending = [os.open(path, _FLAGS)]
    while pending:
        folder = pending.pop()
        try:
            for name, is_folder in _entries(folder):
                counts[is_folder] += 1
                counts[2] += 512 * os.stat(name, dir_fd=folder, follow_symlinks=False).st_blocks
                if is_folder:
                    pending.append(_open_folder(name, folder))
        finally:
            os.close(folder)
    return counts[0], counts[1], counts[2]


def remove(path: str, folder: int, end: float = math.inf) -> None:
    """Remove a folder and all that is in it. No process may change it any more.

    Folders in it are moved up before they are removed. So this neither recurses nor meets a long path.

    Args:
        path: its path.
        folder: its file descriptor.
        end: time of the monotonic clock at which it stops.

    Raises:
        TimeoutError: the time was over.
    """
    own, numbers = os.urandom(8).hex(), itertools.count()
    while entries := _entries(folder):
        for name, is_folder in entries:
            if time.monotonic() > end:
                raise TimeoutError(path)
            if not is_folder:
                os.unlink(name, dir_fd=folder)
                continue
            inner = _open_folder(name, folder)
            try:
                for inner_name, is_inner_folder in _entries(inner):
                    if is_inner_folder:
                        os.close(_open_folder(inner_name, inner))
                        os.rename(inner_name, f"{own}-{next(numbers)}", src_dir_fd=inner, dst_dir_fd=folder)
                    else:
                        os.unlink(inner_name, dir_fd=inner)
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=folder)
    os.rmdir(path)


def remove_abandoned(parent: str, end: float) -> None:
    """Remove the folders in ``parent`` of processes that have ended without removing them.

    Args:
        parent: folder that contains them.
        end: time of the monotonic clock at which no further one is begun.
    """
    try:
        names = os.listdir(parent)
    except OSError:
        # Not every folder for temporary files can be listed.
        return
    for path in (f"{parent}/{name}" for name in names if name.startswith(_PREFIX)):
        if time.monotonic() > end:
            return
        try:
            folder = _lock(path, fcntl.LOCK_EX)
            try:
                remove(path, folder, end)
            finally:
                os.close(folder)
        except OSError:
            # It is in use, is no folder, belongs to somebody else, is gone, or takes too long.
            continue


def _lock(path: str, kind: int) -> int:
    """Return the file descriptor of a folder of this user, locked.

    A folder in use has a shared lock, because a network's file system has no exclusive one for folders.
    """
    folder = os.open(path, _FLAGS)
    try:
        if os.fstat(folder).st_uid != os.geteuid():
            raise PermissionError(f"{path} belongs to another user")
        fcntl.flock(folder, kind | fcntl.LOCK_NB)
        if not os.fstat(folder).st_nlink:
            raise FileNotFoundError(path)
    except OSError:
        os.close(folder)
        raise
    return folder


def _entries(folder: int) -> list[tuple[str, bool]]:
    """Return the names in a folder, and whether each is a folder."""
    with os.scandir(folder) as entries:
        return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]


def _open_folder(name: str, parent: int) -> int:
    """Open a folder, and make it one that can be read and moved."""
    try:
        folder = os.open(name, _FLAGS, dir_fd=parent)
    except PermissionError:
        # The flag of chmod that follows no link is not in every kernel.
        os.chmod(name, 0o700, dir_fd=parent)
        folder = os.open(name, _FLAGS, dir_fd=parent)
    os.fchmod(folder, 0o700)
    return folder
