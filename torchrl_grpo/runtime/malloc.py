"""Keeps freed CPU memory for a job, as torch does on a GPU, and returns it at the end of the job.

For the same time, garbage collection leaves alone what the job has built.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Constants of glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
# Collections of objects that have survived one, for each full collection. Python's own number is 10.
_YOUNG_PER_FULL = 100
# Python 3.12 has frozen a few hundred objects of its own from the start.
_OF_PYTHON = 1_000


def keep_freed_memory() -> bool:
    """Let the C library reuse freed memory instead of returning it to the kernel.

    Each step allocates and frees gigabytes of activations, and the kernel clears every page that it hands
    out: without this a step on two cores took 5 % longer (measured in five pairs). The process keeps its
    largest size until :func:`release_freed_memory`.

    Returns:
        Whether the C library accepted the settings; only glibc has them.
    """
    library = _glibc()
    if library is None:
        return False
    settings = ((_MMAP_THRESHOLD, 2**30), (_TRIM_THRESHOLD, -1), (_TOP_PAD, 2**26))
    # mallopt returns 1 on success.
    return all([library.mallopt(name, value) == 1 for name, value in settings])


def release_freed_memory() -> None:
    """Collect garbage, and return freed memory to the kernel, and freed GPU and pinned memory to the driver.

    For the time between the jobs of a sweep. A job leaves its memory in pieces too small for the large
    tensors of the next one, so the process would grow with each job.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Let garbage collection pass over all objects that exist now, until the block ends.

    What a job has built, half a million objects with its libraries, lives as long as the job. Each full
    collection would look at all of it, and hold up every thread for a tenth of a second or more. If somebody
    has frozen objects already, as an engine of vLLM in this process does, nothing is changed.
    """
    if gc.get_freeze_count() > _OF_PYTHON:
        yield
        return
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    # Without the frozen objects, full collections would be frequent, and each looks at all waiting groups.
    gc.set_threshold(*thresholds[:2], _YOUNG_PER_FULL)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def _glibc() -> ctypes.CDLL | None:
    """The C library of this process; None if it is not glibc."""
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
