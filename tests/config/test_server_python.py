"""The Python of SGLang's environment: what is refused, and with which advice."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torchrl_grpo.config import Config
from torchrl_grpo.config.checks import check_installed
from torchrl_grpo.config.checks.sglang import python_of
from torchrl_grpo.errors import ConfigError


def on_sglang(python: str | None) -> Config:
    cfg = Config()
    cfg.inference_model.backend = "sglang_server"
    cfg.inference_model.server_python = python
    return cfg


@pytest.mark.parametrize(
    ("python", "says"),
    [
        (None, "server_python=null: SGLang needs an environment of its own"),
        ("/nowhere/python", "there is no such file"),
        (sys.executable, "sglang is not installed there"),
        ("/bin/false", "it is no Python 3.11 or newer (exit code 1: it printed nothing)"),
        ("/etc/hostname", "it does not run"),
    ],
)
def test_a_python_without_sglang_is_refused_with_the_way_to_get_it(python: str | None, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_installed(on_sglang(python))
    assert says in str(raised.value)
    assert "server_python=.venv-sglang/bin/python after scripts/setup_sglang.sh" in str(raised.value)


def test_a_python_that_a_signal_ends_is_refused(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nkill -s KILL $$\n")
    python.chmod(0o755)
    with pytest.raises(ConfigError, match="signal 9: it printed nothing"):
        check_installed(on_sglang(str(python)))


def test_a_python_with_sglang_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    # An environment's Python is a link, and only by this path does it find its packages.
    (tmp_path / "sglang.py").touch()
    # As with LD_LIBRARY_PATH, which the server gets too.
    monkeypatch.setenv("ITS_LIBRARIES", str(tmp_path))
    python.write_text(f'#!/bin/sh\nexec env PYTHONPATH="$ITS_LIBRARIES" {sys.executable} "$@"\n')
    python.chmod(0o755)
    cfg = on_sglang(str(python))
    check_installed(cfg)
    assert python_of(cfg.inference_model.server_python) == python


def test_servers_that_run_already_need_no_python_here() -> None:
    cfg = on_sglang(None)
    cfg.inference_model.servers = ["http://127.0.0.1:8000"]
    check_installed(cfg)
