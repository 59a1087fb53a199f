"""Which training rank this process is, as ``torchrun`` and ``accelerate launch`` write in its environment."""

from __future__ import annotations

import os


def launched() -> bool:
    """Whether a launcher has started this process as one of several ranks."""
    return world_size() > 1


def rank() -> int:
    """Number of this process among the training ranks; 0 is the one that collects, logs and saves."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Number of this process among the ranks of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """Training ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def world_size() -> int:
    """Training ranks, 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))
