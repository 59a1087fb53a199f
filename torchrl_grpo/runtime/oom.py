"""Recognizes errors of any device and library that mean too little memory, and reports them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torchrl_grpo.errors import TrainingStopped

_SIGNS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` means that memory ran out; some libraries show this in the text alone."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


@contextmanager
def stop_on_oom(message: str) -> Iterator[None]:
    """Turn an out-of-memory error in the block into :class:`TrainingStopped` with ``message``.

    Args:
        message: text that says what ran and what to change.

    Raises:
        TrainingStopped: memory ran out.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not ran_out_of_memory(error):
            raise
        raise TrainingStopped(message) from error
