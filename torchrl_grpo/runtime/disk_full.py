"""Recognize a disk that is full, which each library that writes a file says in words of its own."""

from __future__ import annotations

import errno
import re

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# How the standard library of Rust ends what the system said: safetensors and tokenizers pass it on as text.
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
# Where torch.save writes, in C++; it does not pass on what the system said.
_TORCH_WRITER = "inline_container"


def says_no_room(error: Exception) -> bool:
    """Whether ``error`` says that a file could not grow: full disk, used up quota, limit of a file's size."""
    if isinstance(error, OSError):
        return error.errno in _NO_ROOM
    text = str(error)
    if type(error) is RuntimeError:
        return _TORCH_WRITER in text
    found = _OS_ERROR.search(text)
    return found is not None and int(found[1]) in _NO_ROOM
