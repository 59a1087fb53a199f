"""Reads the rank of this process from the environment that ``torchrun`` and ``accelerate launch`` set."""

from __future__ import annotations

import os


def launched() -> bool:
    """Whether a launcher started this process as one of several ranks."""
    return world_size() > 1


def rank() -> int:
    """Number of this process among the training ranks; rank 0 collects, logs and saves."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Number of this process among the ranks of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """Number of training ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def world_size() -> int:
    """Number of training ranks; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))
