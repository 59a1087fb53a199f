"""Files that are written past the page cache: every byte of any size, their checksum, and a full disk."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, cast

import numpy
import pytest
import torch
import xxhash

from torchrl_grpo.runtime.files import direct_file
from torchrl_grpo.runtime.files.direct_file import DirectFile

SIZES = (0, 1, 4095, 4096, 4097, 2**22 - 1, 2**22, 2**22 + 1, 9 * 2**20 + 7)


def refuse_direct_opening(path: Path, flags: int, mode: int = 0o777) -> int:
    if flags & os.O_DIRECT:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")
    return OPEN(path, flags, mode)


def refuse_direct_writing(descriptor: int, content: memoryview) -> int:
    if direct_file._is_direct(descriptor):
        raise OSError(errno.EINVAL, "Invalid argument")
    return WRITE(descriptor, content)


def write_in_parts(descriptor: int, content: memoryview) -> int:
    """Write less than there is, as the system may."""
    return WRITE(descriptor, content[: max(1, len(content) // 3)])


OPEN, WRITE = os.open, os.write
SYSTEMS: dict[str, tuple[str, Callable[..., int]]] = {
    "this one": ("write", os.write),
    "no direct files": ("open", refuse_direct_opening),
    "no direct writes": ("write", refuse_direct_writing),
    "short writes": ("write", write_in_parts),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_byte_is_written_and_summed(
    size: int, system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, function = SYSTEMS[system]
    monkeypatch.setattr(os, name, function)
    content, path = numpy.random.default_rng(size).bytes(size), tmp_path / "file"
    path.write_bytes(b"older and longer" * 2**20)
    with DirectFile(path) as file:
        assert file.write(content[:7]) == len(content[:7])
        file.write(numpy.frombuffer(content[7:5000], numpy.uint8) if size > 7 else b"")
        file.write(memoryview(content)[5000:])
    assert path.read_bytes() == content
    assert file.written == (size, xxhash.xxh3_64_hexdigest(content))


@pytest.mark.parametrize("writer", ["torch.save", "a plain write"])
def test_what_the_system_says_of_a_full_disk_is_raised(writer: str, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"), DirectFile(tmp_path / "file") as file:
            if writer == "torch.save":
                torch.save({"weights": torch.zeros(2**21)}, cast(IO[bytes], file))
            else:
                file.write(b"a" * 2**23)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_an_error_of_another_kind_stays_itself(tmp_path: Path) -> None:
    with pytest.raises(KeyError), DirectFile(tmp_path / "file") as file:
        file.write(b"some")
        raise KeyError("x")


def test_whole_pages_go_past_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[tuple[bool, int]] = []

    def note(descriptor: int, content: memoryview) -> int:
        parts.append((direct_file._is_direct(descriptor), len(content)))
        return WRITE(descriptor, content)

    try:
        os.close(OPEN(tmp_path / "trial", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system cannot write past the page cache")
    monkeypatch.setattr(os, "write", note)
    with DirectFile(tmp_path / "file") as file:
        file.write(bytes(2**22 + 2**13 + 5))
    # The end is refused once, and then written through the cache.
    assert parts == [(True, 2**22), (True, 2**13), (True, 5), (False, 5)]


@pytest.mark.parametrize(
    ("rates", "direct"),
    [
        ([200] * 6, [True] * 4 + [False] * 2),
        ([200, 200, 200, 300] * 2, [True] * 8),
        ([300] * 4 + [200] * 5, [True] * 8 + [False]),
    ],
)
def test_a_slow_disk_is_written_through_the_page_cache(
    rates: list[int], direct: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, blocks = [0.0], list[bool]()

    def write_slowly(descriptor: int, content: memoryview) -> int:
        now[0] += len(content) / (rates[len(blocks)] * 1e6)
        blocks.append(direct_file._is_direct(descriptor))
        return WRITE(descriptor, content)

    monkeypatch.setattr(os, "write", write_slowly)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    with DirectFile(tmp_path / "file") as file:
        if not direct_file._is_direct(file._descriptor):
            pytest.skip("this file system cannot write past the page cache")
        file.write(bytes(len(rates) * 2**22))
    assert blocks == direct
    assert (tmp_path / "file").stat().st_size == len(rates) * 2**22


@pytest.mark.parametrize("fails", [False, True])
def test_a_descriptor_is_closed(fails: bool, tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with contextlib.suppress(KeyError), DirectFile(tmp_path / "file") as file:
        file.write(b"some")
        if fails:
            raise KeyError("x")
    assert set(os.listdir("/proc/self/fd")) == before


def test_an_interrupt_after_an_error_stays_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, content: memoryview) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(KeyboardInterrupt), DirectFile(tmp_path / "file") as file:
        monkeypatch.setattr(os, "write", refuse)
        with pytest.raises(OSError, match="Input/output"):
            file.write(bytes(2**22))
        raise KeyboardInterrupt
