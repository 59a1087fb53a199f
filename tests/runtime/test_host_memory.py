"""Freed memory is kept, and given back on request, where the C library can be told to."""

from __future__ import annotations

import gc
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from torchrl_grpo.runtime.malloc import frozen_objects

_MEASURED = """
import json, os, resource, torch
from torchrl_grpo.runtime.malloc import keep_freed_memory, release_freed_memory

def use():
    return [torch.ones(16_000_000) for _ in range(4)]

def faults(keep):
    if keep:
        assert keep_freed_memory()
    for _ in range(3):
        use()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        use()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def memory_gib():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines["VmRSS"].split()[0]) / 2**20

def given_back():
    assert keep_freed_memory()
    tensors = [torch.ones(4_000_000) for _ in range(64)]
    kept = tensors[::16]
    full = memory_gib()
    del tensors
    freed = memory_gib()
    release_freed_memory()
    return full, freed, memory_gib()

# Each in a process of its own, of which torch is imported once.
for measure in (lambda: faults(True), lambda: faults(False), given_back):
    if (child := os.fork()) == 0:
        print(json.dumps(measure()), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.fixture(scope="module")
def measured() -> list[Any]:
    """Page faults with memory that is kept, and without; resident GiB full, freed, and given back."""
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("only glibc has these settings")
    # vLLM, once imported, puts another allocator in front of whatever is started next.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED], capture_output=True, text=True, check=True, env=environment
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_memory_that_was_freed_is_not_fetched_from_the_kernel_again(measured: list[Any]) -> None:
    kept, returned, _ = measured
    # A few rounds may still meet new pages (a small block in the way, pages the kernel took back itself).
    assert kept * 4 < returned


@pytest.mark.slow
def test_what_a_job_leaves_is_given_back_from_between_what_stays(measured: list[Any]) -> None:
    full, freed, left = measured[2]
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


@pytest.mark.slow
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
