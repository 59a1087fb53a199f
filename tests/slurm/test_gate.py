"""What a job waits for before its trainer begins."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_server import FakeServer, make_engine

from torchrl_grpo.errors import ConfigError
from torchrl_grpo.slurm import gate


@pytest.fixture
def server(tiny_model_dir: Path, tmp_path: Path) -> Iterator[FakeServer]:
    made = FakeServer(make_engine(tiny_model_dir), tmp_path / "socket")
    yield made
    made.kill()


def test_servers_must_generate(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert gate.main([server.address, "--timeout=20"]) == 0
    assert capsys.readouterr().out == f"{server.address} has generated a token\n"
    assert "/inference/v1/generate" in server.requests


@pytest.mark.slow
def test_a_server_that_listens_and_does_not_generate_is_not_ready(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    server.hangs = True
    assert gate.main([server.address, "--timeout=1"]) == 2
    assert "is not ready after 1 s" in capsys.readouterr().err


@pytest.mark.slow
def test_another_key_and_nobody_there(server: FakeServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="refuses the key"):
        gate.wait_for_servers([server.address], "wrong", 20)
    with pytest.raises(ConfigError, match=r"is not ready after 0.5 s .*no server answered"):
        gate.wait_for_servers([f"unix:{tmp_path}/nobody"], "secret", 0.5)


@pytest.mark.slow
def test_a_port_that_opens_later_is_waited_for() -> None:
    with socket.socket() as later:
        later.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{later.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"did not reach 1 node within 0.1 s \(nothing is listening\)"):
            gate.wait_for_ray(address, 0, 0.1)
        timer = threading.Timer(0.2, later.listen)
        timer.start()
        gate.wait_for_ray(address, 0, 20)
        timer.join()
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
