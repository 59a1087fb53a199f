"""Paths that users write."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(path: str | Path) -> Path:
    """Return a path with the home folder in place of ``~``.

    A user who does not exist stays as written, as in a shell, and there is no such file then. pathlib would
    raise.
    """
    return Path(os.path.expanduser(path))
