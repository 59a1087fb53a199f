"""Files in folders that other users can write to: nothing there is used before its owner and kind are known.

Opening a FIFO that somebody else has put there would block for ever, and a link would lead anywhere. A file
of the user's own choice may be a link, so :func:`open_regular` follows it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_LOCK = "lock"
# Age in seconds below which a folder that has not been locked yet is left alone.
_NEW_S = 60.0
# Bytes of the largest file that read_small() reads.
_SMALL = 4 * 2**20
# A FIFO or a device must neither block nor become the terminal of this process.
_CAREFUL = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def open_regular(path: Path | str, flags: int = os.O_RDONLY, *, own: bool = False) -> int:
    """Open a regular file, and return its descriptor. This never blocks.

    Args:
        path: the file.
        flags: flags of :func:`os.open`.
        own: whether it must belong to this user and must not be a link.

    Raises:
        OSError: it cannot be opened, is no regular file, or belongs to somebody else.
    """
    return _open(path, flags, None, own)


def read_regular(path: Path | str, *, own: bool = False) -> bytes:
    """Return the content of a file, see :func:`open_regular`."""
    with os.fdopen(open_regular(path, own=own), "rb") as file:
        return file.read()


def read_small(path: Path) -> bytes:
    """Return the content of a file in a folder that may be from somebody else, and may be made to deceive.

    Raises:
        OSError: it cannot be read, is a link or no regular file, or is too large.
    """
    with os.fdopen(open_regular(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        content = file.read(_SMALL + 1)
    if len(content) > _SMALL:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return content


def replace(path: Path, content: str) -> None:
    """Write a file that may exist. Readers see the old content or the new one, whatever stops this.

    Raises:
        OSError: it cannot be written; the old content stays.
    """
    # Not by mkstemp(), whose files are for this user alone.
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with aside.open("x", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException as error:
        aside.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _open(path: Path | str, flags: int, folder: int | None, own: bool) -> int:
    try:
        descriptor = os.open(path, flags | _CAREFUL | (os.O_NOFOLLOW if own else 0), 0o644, dir_fd=folder)
    except OSError as error:
        # ENXIO: a FIFO that nobody reads, or a socket.
        if error.errno == errno.ENXIO or (own and error.errno == errno.ELOOP):
            raise _irregular(path) from error
        raise
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise _irregular(path)
        if own and about.st_uid != os.geteuid():
            raise OSError(errno.EPERM, "belongs to another user", str(path))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _irregular(path: Path | str) -> OSError:
    return OSError(errno.EINVAL, "is not a regular file", str(path))


@contextmanager
def own_folder(path: Path) -> Iterator[int]:
    """Open a folder of this user, which is no link.

    Raises:
        OSError: there is none, or it belongs to somebody else.
    """
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | _CAREFUL)
    try:
        if os.fstat(folder).st_uid != os.geteuid():
            raise OSError(errno.EPERM, "belongs to another user", str(path))
        yield folder
    finally:
        os.close(folder)


class Folder:
    """A folder of this process, which is deleted with this object.

    Attributes:
        path: the folder.
        close: function that deletes it earlier; it may be called twice.

    Args:
        parent: folder to create it in, e.g. ``/dev/shm``.
        prefix: beginning of its name.
    """

    def __init__(self, parent: Path, prefix: str) -> None:
        # It gets its name once it is locked, so that no other process takes it for an abandoned one.
        made = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=parent))
        # The kernel takes this lock back when the process ends, however it ends.
        lock = (made / _LOCK).open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX)
        self.path = made.rename(made.with_name(made.name.removeprefix(".")))
        self.close = weakref.finalize(self, _delete, self.path, lock)


def _delete(folder: Path, lock: IO[bytes]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    lock.close()


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Delete folders in ``parent`` whose process has ended without deleting them.

    Whatever does not look exactly like a folder of this user stays.
    """
    for path in [*parent.glob(f"{prefix}*"), *parent.glob(f".{prefix}*")]:
        # An error: it is in use, belongs to somebody else, is something else, or is being deleted.
        with contextlib.suppress(OSError), own_folder(path) as folder:
            if path.name.startswith(".") and time.time() - os.fstat(folder).st_mtime < _NEW_S:
                # Another process may be about to lock it.
                continue
            # Writable, because NFS locks no other file.
            lock = _open(_LOCK, os.O_RDWR, folder, own=True)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _delete_open(path, folder)
            finally:
                os.close(lock)


def _delete_open(path: Path, folder: int) -> None:
    """Delete an open folder. Somebody may have exchanged it for another of the same name meanwhile."""
    for name in os.listdir(folder):
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            shutil.rmtree(name, ignore_errors=True, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)
    path.rmdir()
