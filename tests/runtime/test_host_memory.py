"""Freed memory is kept, and given back on request, where the C library can be told to."""

from __future__ import annotations

import gc
import os
import platform
import subprocess
import sys
from collections.abc import Iterator

import pytest

from torchrl_grpo.runtime.malloc import frozen_objects

_FAULTS = """
import resource, sys, torch
from torchrl_grpo.runtime.malloc import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def use():
    return [torch.ones(16_000_000) for _ in range(4)]
for _ in range(3):
    use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_memory_that_was_freed_is_not_fetched_from_the_kernel_again() -> None:
    # vLLM, once imported, puts another allocator in front of whatever is started next.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    faults = {
        mode: int(
            subprocess.run(
                [sys.executable, "-c", _FAULTS, mode],
                capture_output=True, text=True, check=True, env=environment,
            ).stdout
        )
        for mode in ("keep", "return")
    }  # fmt: skip
    # A few rounds may still meet new pages (a small block in the way, pages the kernel took back itself).
    assert faults["keep"] * 4 < faults["return"]


_GIVEN_BACK = """
import torch
from torchrl_grpo.runtime.malloc import release_freed_memory, keep_freed_memory
def memory_gib():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines["VmRSS"].split()[0]) / 2**20
assert keep_freed_memory()
tensors = [torch.ones(4_000_000) for _ in range(64)]
kept = tensors[::16]
full = memory_gib()
del tensors
freed = memory_gib()
release_freed_memory()
print(full, freed, memory_gib())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_what_a_job_leaves_is_given_back_from_between_what_stays() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(
        [sys.executable, "-c", _GIVEN_BACK], capture_output=True, text=True, check=True, env=environment
    )
    full, freed, left = map(float, done.stdout.split())
    # 0.95 GiB were in tensors, of which 0.06 are still there.
    assert full - freed < 0.1 and full - left > 0.8


def _collected(item: object) -> bool:
    return any(each is item for each in gc.get_objects())


@pytest.fixture
def _nothing_frozen() -> Iterator[None]:
    """Freeze again, as the other tests have it."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("_nothing_frozen")
def test_garbage_collection_leaves_alone_what_a_job_has_built() -> None:
    built, before = [object()], gc.get_threshold()
    with pytest.raises(KeyError), frozen_objects():
        later = [object()]
        assert not _collected(built)
        assert _collected(later) and gc.get_threshold()[2] > before[2]
        raise KeyError
    assert _collected(built) and gc.get_threshold() == before


@pytest.mark.usefixtures("_nothing_frozen")
def test_objects_that_somebody_else_has_frozen_stay_frozen() -> None:
    built = [[number] for number in range(2_000)]
    gc.freeze()
    with frozen_objects():
        later = [object()]
        assert _collected(later)
    assert not _collected(built)
