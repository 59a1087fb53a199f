"""Shared memory: what nobody uses, and segments of a process group that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing import shared_memory as segments
from pathlib import Path

from torchrl_grpo.runtime.shared_memory import ROOT, abandoned, segments_of, unlink

CODE = """
import sys
from multiprocessing import shared_memory
mine = shared_memory.SharedMemory(create=True, size=4096)
print(mine.name, flush=True)
sys.stdin.read()
"""


def test_a_segment_is_abandoned_once_its_process_has_ended() -> None:
    mine = segments.SharedMemory(create=True, size=4096)
    try:
        assert mine.name not in abandoned()
        mine.close()
        assert mine.name in abandoned()
    finally:
        mine.unlink()


def test_a_file_in_a_folder_counts_as_used_while_it_is_open(tmp_path: Path) -> None:
    folder = ROOT / f"torchrl-grpo-test-{os.getpid()}"
    folder.mkdir()
    try:
        with (folder / "file").open("wb"):
            assert folder.name not in abandoned()
        assert folder.name in abandoned()
    finally:
        (folder / "file").unlink()
        folder.rmdir()


def test_the_segments_of_a_group_go_with_it_and_others_stay() -> None:
    mine = segments.SharedMemory(create=True, size=4096)
    child = subprocess.Popen(
        [sys.executable, "-c", CODE],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        name = child.stdout.readline().strip()
        assert (ROOT / name).exists() and name not in abandoned()
        assert segments_of(child.pid) == {name}
        unlink(segments_of(child.pid))
        assert not (ROOT / name).exists() and (ROOT / mine.name).exists()
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        mine.close()
        mine.unlink()
