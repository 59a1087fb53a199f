"""A place for sockets, whose paths are short: those of temporary files are long on many clusters."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from torchrl_grpo.errors import ConfigError

# Longest path of a socket in bytes, as Linux has it.
LONGEST = 107
# Folders in which every user may create files.
_PLACES = ("/tmp", "/var/tmp", "/dev/shm")


def socket_parent(room: int, usual: str | None = None) -> Path:
    """Return a folder in which paths of sockets are short enough.

    Others can write there too: a socket must lie in a folder of its own, or have a name that nobody guesses.

    Args:
        room: bytes by which the path of a socket is longer than that of the folder.
        usual: folder to return if its path is short enough; None for that of temporary files.

    Raises:
        ConfigError: there is no such folder.
    """
    usual = tempfile.gettempdir() if usual is None else usual
    for place in (usual, *_PLACES):
        if len(os.fsencode(place)) + room <= LONGEST and os.access(place, os.W_OK | os.X_OK):
            return Path(place)
    raise ConfigError(
        f"TMPDIR={usual}: the path of a socket has at most {LONGEST} bytes, and {room} of them come behind "
        f"this folder; set TMPDIR to a folder with a shorter path, or make {_PLACES[0]} writable"
    )
