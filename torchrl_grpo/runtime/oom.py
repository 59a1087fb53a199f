"""Memory that ran out, of whichever device and library: how it is told from other errors, and said."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torchrl_grpo.errors import TrainingStopped

_SIGNS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that there was too little memory; some libraries say so by its text alone."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


@contextmanager
def stopping(message: str) -> Iterator[None]:
    """Let ``message`` be what a user sees where memory runs out inside.

    Args:
        message: what was being done, and what to change.

    Raises:
        TrainingStopped: memory ran out.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not ran_out_of_memory(error):
            raise
        raise TrainingStopped(message) from error
