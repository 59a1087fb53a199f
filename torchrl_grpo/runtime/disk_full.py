"""Recognizes a full disk, which every library that writes files reports differently."""

from __future__ import annotations

import errno
import re

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Rust's standard library appends this to the system's message; safetensors and tokenizers pass on the text.
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def is_disk_full_error(error: Exception) -> bool:
    """Whether a file could not grow: the disk is full, or a quota or a limit of file sizes is reached."""
    if isinstance(error, OSError):
        return error.errno in _NO_ROOM
    match = _OS_ERROR.search(str(error))
    return match is not None and int(match[1]) in _NO_ROOM
