"""Memory that a job has freed: kept for it on a CPU, as torch does on a GPU, and given back at its end."""

from __future__ import annotations

import ctypes
import gc
import sys

import torch

# Of glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3


def keep_freed_memory() -> bool:
    """Let the C library hand freed memory out again instead of giving it back to the kernel.

    Activations come and go by the gigabyte in every step, and the kernel clears each page that it hands out:
    a step on two cores took 5 % longer (measured, five pairs). The process stays as large as it has been
    until :func:`give_back_freed_memory`.

    Returns:
        Whether the C library took the settings; another one than glibc has none of them.
    """
    library = _glibc()
    if library is None:
        return False
    settings = ((_MMAP_THRESHOLD, 2**30), (_TRIM_THRESHOLD, -1), (_TOP_PAD, 2**26))
    # Each call says 1 when it took the value.
    return all([library.mallopt(name, value) == 1 for name, value in settings])


def give_back_freed_memory() -> None:
    """Collect garbage, and hand the memory of it back: to the kernel, and of a GPU to whoever else wants it.

    Between the jobs of a sweep: what one leaves is in pieces, in which the next one's large tensors do not
    fit, and the process would grow with each job.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    """The C library of this process where it is glibc."""
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
