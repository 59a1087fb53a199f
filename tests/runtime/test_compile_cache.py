"""The folder of compiled code."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from torchrl_grpo.errors import ConfigError
from torchrl_grpo.runtime.files import compile_cache


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "chosen")


def test_the_folder_is_made_for_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_cache.use_own()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "chosen" and not list(tmp_path.iterdir())
    for _ in range(2):
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
        compile_cache.use_own()
        (made,) = tmp_path.iterdir()
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(made) and made.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("somebody else's", marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root")),
        "link",
        "file",
    ],
)
def test_a_folder_that_others_have_made_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    compile_cache.use_own()
    (made,) = tmp_path.iterdir()
    if kind == "somebody else's":
        os.chown(made, 4711, 4711)
    else:
        made.rmdir()
        made.touch() if kind == "file" else made.symlink_to(tmp_path)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    with pytest.raises(ConfigError, match="set TORCHINDUCTOR_CACHE_DIR to a folder of your own"):
        compile_cache.use_own()
