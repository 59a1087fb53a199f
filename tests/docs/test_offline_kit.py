"""The kit for machines without a package index: the files that a lock names, and what a bad copy says."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

LOCK = """
lock-version = "1.0"
[[packages]]
name = "chosen"
version = "2.0"
wheels = [
    { url = "https://example.org/chosen-2.0-py3-none-any.whl" },
    { url = "https://example.org/chosen-2.0-cp27-cp27m-win32.whl" },
    { url = "https://example.org/chosen-2.0%2Bcpu-cpTHIS-cpTHIS-linux_x86_64.whl" },
]
[[packages]]
name = "near"
version = "1.0"
wheels = [{ path = "near-1.0-py3-none-any.whl" }]
[[packages]]
name = "source"
version = "1.0"
sdist = { url = "https://example.org/source-1.0.tar.gz" }
wheels = [{ url = "https://example.org/source-1.0-cp27-cp27m-win32.whl" }]
"""


def files_of(repo_root: Path, lock: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(repo_root / "scripts/locked_wheels.py"), str(lock)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.skipif(sys.platform != "linux", reason="the wheel that is chosen is one for Linux")
def test_each_package_has_its_best_file(repo_root: Path, tmp_path: Path) -> None:
    lock = tmp_path / "pylock.toml"
    this = f"{sys.version_info.major}{sys.version_info.minor}"
    lock.write_text(LOCK.replace("THIS", this))
    assert files_of(repo_root, lock).stdout.splitlines() == [
        f"https://example.org/chosen-2.0%2Bcpu-cp{this}-cp{this}-linux_x86_64.whl",
        str(tmp_path / "near-1.0-py3-none-any.whl"),
        "https://example.org/source-1.0.tar.gz",
    ]
    lock.write_text(LOCK.replace('sdist = { url = "https://example.org/source-1.0.tar.gz" }\n', ""))
    done = files_of(repo_root, lock)
    assert done.returncode == 1 and "source 1.0: no file for this Python" in done.stderr


SET_UP = """
echo "$ACCELERATOR $VLLM no index: $PIP_NO_INDEX $UV_NO_INDEX, links: $PIP_FIND_LINKS" >done
"""


def kit(repo_root: Path, folder: Path) -> Path:
    """A kit without packages, of a project whose set-up writes down how it was called."""
    (folder / "wheels").mkdir(parents=True)
    (folder / "wheels/a.whl").write_text("a wheel")
    script = folder / "set_up.sh"
    script.write_text(SET_UP)
    with tarfile.open(folder / "project.tar", "w") as archive:
        archive.add(script, "scripts/setup.sh")
    script.unlink()
    (folder / "settings").write_text("ACCELERATOR=cpu\nVLLM=0.24\n")
    (folder / "setup.sh").write_text((repo_root / "scripts/offline_setup.sh").read_text())
    sums = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}\n"
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    ]
    (folder / "SHA256SUMS").write_text("".join(sums))
    return folder


def set_up(folder: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(folder / "setup.sh"), str(target)]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_kit_sets_up_what_it_was_made_for_without_an_index(repo_root: Path, tmp_path: Path) -> None:
    folder = kit(repo_root, tmp_path / "kit")
    done = set_up(folder, tmp_path / "project")
    assert done.returncode == 0, done.stderr
    called = (tmp_path / "project/done").read_text()
    assert called == f"cpu 0.24 no index: 1 1, links: {folder}/wheels\n"
    done = set_up(folder, tmp_path / "project")
    assert done.returncode == 2 and f"{tmp_path}/project exists; name a new folder" in done.stderr


@pytest.mark.parametrize("fault", ["missing", "damaged"])
def test_a_bad_copy_of_a_kit_is_refused(fault: str, repo_root: Path, tmp_path: Path) -> None:
    folder = kit(repo_root, tmp_path / "kit")
    wheel = folder / "wheels/a.whl"
    if fault == "missing":
        wheel.unlink()
    else:
        wheel.write_text("half")
    done = set_up(folder, tmp_path / "project")
    assert done.returncode == 2 and "files of the kit are missing or damaged" in done.stderr
    assert "wheels/a.whl" in done.stdout + done.stderr and not (tmp_path / "project").exists()


def test_a_kit_says_for_what_it_is(repo_root: Path, tmp_path: Path) -> None:
    command = ["bash", str(repo_root / "scripts/offline_kit.sh"), str(tmp_path / "kit")]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 2 and "write ACCELERATOR=cuda or ACCELERATOR=cpu" in done.stderr
    assert not (tmp_path / "kit").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["kit", "--model", "a/model", "--model", "b/model"], "model/model of the kit is"),
        (["kit", "--model", "a/model", "--model", "a/other/../model/."], "model/model of the kit is"),
        (["kit", "--model", "a/model", "--data", "b/model"], "kit exists; name a new folder"),
        (["kit", "--data", "scripts"], "--data scripts: there is no such folder"),
        (["kit", "--data"], "--data : there is no such folder"),
        (["a kit"], "a kit has a space or a comma"),
        (["a,kit"], "a,kit has a space or a comma"),
    ],
)
def test_what_a_kit_cannot_hold_is_refused_first(
    repo_root: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    for name in ("kit", "a kit", "a,kit", "a/model", "a/other", "b/model"):
        (tmp_path / name).mkdir(parents=True)
    command = ["bash", str(repo_root / "scripts/offline_kit.sh"), *words]
    environment = {"PATH": "/usr/bin:/bin", "ACCELERATOR": "cpu"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and message in done.stderr


@pytest.mark.parametrize("name", ["a kit", "a,kit"])
def test_a_kit_in_a_folder_that_pip_would_split_is_refused(
    repo_root: Path, tmp_path: Path, name: str
) -> None:
    done = set_up(kit(repo_root, tmp_path / name), tmp_path / "project")
    assert done.returncode == 2 and f"{name} has a space or a comma" in done.stderr
    assert not (tmp_path / "project").exists()
