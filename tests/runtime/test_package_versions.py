"""What is recorded of the code that runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from torchrl_grpo.runtime.package_versions import commit


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_the_commit_of_a_checkout_and_whether_its_code_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Those of a hook that runs the tests.
    for variable in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(variable, raising=False)
    assert commit(tmp_path) is None
    git(tmp_path, "init")
    commit.cache_clear()
    assert commit(tmp_path) is None, "nothing is committed"
    for name in ("code.py", "records.json"):
        (tmp_path / name).write_text("1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "Begin")
    head = git(tmp_path, "rev-parse", "HEAD")
    commit.cache_clear()
    assert commit(tmp_path) == head[:12]
    (tmp_path / "records.json").write_text("2\n")
    commit.cache_clear()
    assert commit(tmp_path) == head[:12], "results are no code"
    (tmp_path / "code.py").write_text("2\n")
    commit.cache_clear()
    assert commit(tmp_path) == f"{head[:12]}-dirty"
    # A package that is installed within somebody's checkout.
    (tmp_path / "site-packages").mkdir()
    assert commit(tmp_path / "site-packages") is None


def test_without_git_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit(tmp_path) is None
