"""Files and folders in a place where others write too."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torchrl_grpo.runtime.files.shared_files import (
    Folder,
    open_regular,
    own_folder,
    read_regular,
    remove_abandoned,
)

PREFIX = "mine-"
APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND


def without_waiting(work: Callable[[], object]) -> None:
    """Run ``work`` in a thread, and fail if it blocks."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "it blocks"


@pytest.fixture
def abandoned(tmp_path: Path) -> Path:
    """A folder of a process that was killed, with a folder in it."""
    code = (
        "import os, sys; from pathlib import Path\n"
        "from torchrl_grpo.runtime.files.shared_files import Folder\n"
        "made = Folder(Path(sys.argv[1]), sys.argv[2]); (made.path / 'inner').mkdir()\n"
        "(made.path / 'inner' / 'file').touch(); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path), PREFIX], check=False)
    assert done.returncode == -9
    (left,) = tmp_path.glob(f"{PREFIX}*")
    return left


def test_a_folder_whose_process_was_killed_is_removed(tmp_path: Path, abandoned: Path) -> None:
    mine = Folder(tmp_path, PREFIX)
    remove_abandoned(tmp_path, PREFIX)
    assert list(tmp_path.iterdir()) == [mine.path]
    mine.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_being_made_stays_for_a_minute(tmp_path: Path, abandoned: Path) -> None:
    unlocked = abandoned.rename(abandoned.with_name(f".{abandoned.name}"))
    os.utime(unlocked)
    remove_abandoned(tmp_path, PREFIX)
    assert unlocked.exists()
    os.utime(unlocked, (0, 0))
    remove_abandoned(tmp_path, PREFIX)
    assert not unlocked.exists()


def test_a_folder_of_somebody_else_stays(
    tmp_path: Path, abandoned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    remove_abandoned(tmp_path, PREFIX)
    assert (abandoned / "inner" / "file").exists()


def test_what_looks_like_an_abandoned_folder_neither_blocks_nor_leads_elsewhere(
    tmp_path: Path, abandoned: Path
) -> None:
    elsewhere = abandoned.rename(tmp_path / "elsewhere")
    (tmp_path / f"{PREFIX}link").symlink_to(elsewhere)
    (tmp_path / f"{PREFIX}file").touch()
    os.mkfifo(tmp_path / f"{PREFIX}fifo")
    for name in ("fifo", "link"):
        (tmp_path / f"{PREFIX}lock-{name}").mkdir()
    os.mkfifo(tmp_path / f"{PREFIX}lock-fifo" / "lock")
    (tmp_path / f"{PREFIX}lock-link" / "lock").symlink_to(elsewhere / "lock")
    before = sorted(tmp_path.rglob("*"))
    without_waiting(lambda: remove_abandoned(tmp_path, PREFIX))
    assert sorted(tmp_path.rglob("*")) == before


def test_links_in_an_abandoned_folder_are_removed_and_not_followed(tmp_path: Path, abandoned: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    (abandoned / "link").symlink_to(kept)
    (abandoned / "inner" / "link").symlink_to(kept)
    remove_abandoned(tmp_path, PREFIX)
    assert sorted(tmp_path.rglob("*")) == [kept, kept / "file"]


@pytest.fixture(params=["fifo", "socket", "folder", "device"])
def irregular(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    path = tmp_path / request.param
    with socket.socket(socket.AF_UNIX) as made:
        if request.param == "fifo":
            os.mkfifo(path)
        elif request.param == "socket":
            made.bind(str(path))
        elif request.param == "folder":
            path.mkdir()
        else:
            path = Path(os.devnull)
        yield path


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR, APPEND])
def test_only_regular_files_are_opened(irregular: Path, flags: int) -> None:
    refused = []

    def work() -> None:
        with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
            open_regular(irregular, flags)
        refused.append(irregular)

    without_waiting(work)
    assert refused


def test_an_own_file_is_no_link_and_belongs_to_this_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"content")
    link.symlink_to(file)
    assert read_regular(file, own=True) == read_regular(link) == b"content"
    with pytest.raises(OSError, match="not a regular file"):
        read_regular(link, own=True)
    with pytest.raises(NotADirectoryError), own_folder(file):
        pass
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    assert read_regular(file) == b"content"
    with pytest.raises(OSError, match="belongs to another user"):
        read_regular(file, own=True)
    with pytest.raises(OSError, match="belongs to another user"), own_folder(tmp_path):
        pass
