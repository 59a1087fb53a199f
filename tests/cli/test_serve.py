"""``grpo-serve``: the command that it runs, and mistakes."""

from __future__ import annotations

import itertools
import os
import shlex
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from torchrl_grpo.cli import listening, serve
from torchrl_grpo.config import Config
from torchrl_grpo.config.values import KEY_VARIABLE
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.inference.servers.sglang.command import sglang_arguments
from torchrl_grpo.inference.vllm_compat import has_token_server


@pytest.fixture(autouse=True)
def _without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.delenv("SGLANG_API_KEY", raising=False)
    monkeypatch.setattr(serve, "check_installed", lambda cfg: None)


def test_the_command_has_what_the_run_has(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["inference_model.max_model_len=300", "env.num_envs=16", "inference_model.dtype=float32"]
    serve.main(["--print", "--port", "8123", f"model.name={tiny_model_dir}", "env.repeats=8", *words])
    (line,) = capsys.readouterr().out.splitlines()
    command = shlex.split(line)
    assert f"{KEY_VARIABLE}=YOUR_KEY" in command
    options = dict(itertools.pairwise(command))
    assert options["--model"] == str(tiny_model_dir) and options["--port"] == "8123"
    assert options["--host"] == "127.0.0.1" and options["--dtype"] == "float32"
    assert options["--max-model-len"] == "300" and options["--max-num-seqs"] == "128"
    assert options["--middleware"].endswith("RequireKey")
    # An older vLLM gets the routes by another middleware.
    assert ("--enable-scale-out" in command) is has_token_server()
    assert any(word.endswith("OlderRoutes") for word in command) is not has_token_server()


def test_a_server_is_started_in_place_of_the_command(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda path, words, env: seen.append((words, env)))
    serve.main(["--uds", str(tmp_path / "s"), f"model.name={tiny_model_dir}"])
    ((words, env),) = seen
    assert words[words.index("--uds") + 1] == str(tmp_path / "s") and "--port" not in words
    # A key is made and told, because the run needs it.
    assert len(env[KEY_VARIABLE]) > 30 and f"{KEY_VARIABLE}={env[KEY_VARIABLE]}" in capsys.readouterr().out
    monkeypatch.setenv(KEY_VARIABLE, "mine")
    serve.main(["--host", "0.0.0.0", f"model.name={tiny_model_dir}"])
    assert seen[1][1][KEY_VARIABLE] == "mine" and "mine" not in capsys.readouterr().out


def test_sglang_is_started_from_its_own_environment(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda path, words, env: seen.append((words, env)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("SGLANG_API_KEY", "mine")
    monkeypatch.setenv("PYTHONPATH", "/packages/of/this/project")
    options = {"backend": "sglang_server", "server_python": sys.executable, "max_model_len": 300}
    options |= {"dtype": "bfloat16", "head_dtype": "float32", "engine_args.schedule_policy": "lpm"}
    words = [f"inference_model.{key}={value}" for key, value in options.items()]
    serve.main([f"model.name={tiny_model_dir}", "env.num_envs=16", "env.repeats=8", *words])
    ((command, env),) = seen
    assert command[:2] == [sys.executable, "-P"] and command[2].endswith("sglang/program.py")
    flags = dict(itertools.pairwise(command))
    assert flags["--model-path"] == str(tiny_model_dir) and flags["--port"] == "8000"
    assert flags["--context-length"] == "300" and flags["--max-running-requests"] == "128"
    assert flags["--dtype"] == "bfloat16" and "--enable-fp32-lm-head" in command
    assert flags["--device"] == "cpu" and flags["--schedule-policy"] == "lpm"
    assert flags["--custom-weight-loader"].endswith("loader.answer")
    # Keys and values of two layers, two heads of 32 numbers in two bytes each: 512 bytes a token.
    assert int(flags["--max-total-tokens"]) == 2**30 // 512
    assert env["SGLANG_API_KEY"] == "mine" and "mine" not in " ".join(command) + capsys.readouterr().out
    assert env["PYTHONPATH"] == ""


def test_sglang_on_a_gpu_honors_seeds(tiny_model_dir: Path) -> None:
    cfg = Config()
    cfg.model.name = str(tiny_model_dir)
    share: dict[str, Any] = {"max_num_seqs": 8, "gpu_memory_utilization": 0.5}
    arguments = sglang_arguments(cfg, torch.device("cuda"), **share)
    assert arguments["enable_deterministic_inference"] is True and arguments["mem_fraction_static"] == 0.5
    assert "device" not in arguments and "max_total_tokens" not in arguments
    cfg.inference_model.engine_args = {"enable_deterministic_inference": False}
    assert sglang_arguments(cfg, torch.device("cuda"), **share)["enable_deterministic_inference"] is False


def test_what_a_server_inherits(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execve", lambda path, words, env: seen.append(env))
    words = ["--uds", str(tmp_path / "s"), f"model.name={tiny_model_dir}"]
    monkeypatch.setattr(tempfile, "tempdir", "/short")
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    monkeypatch.setattr(os, "access", lambda path, mode: True)
    serve.main(words)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "3")
    # Sockets of vLLM would have too long a path there.
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * 80)
    serve.main(words)
    assert "VLLM_RPC_BASE_PATH" not in seen[0] and seen[1]["VLLM_RPC_BASE_PATH"] == "/tmp"
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} & seen[1].keys()


@pytest.fixture
def taken(tmp_path: Path) -> Iterator[int]:
    """A port and a socket ``taken`` that somebody listens at, and other things in their way."""
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere/socket")
    with socket.create_server(("127.0.0.1", 0)) as port, socket.socket(socket.AF_UNIX) as uds:
        uds.bind(str(tmp_path / "taken"))
        uds.listen()
        yield port.getsockname()[1]


def test_a_port_that_is_taken_is_one_line(
    taken: int, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "execve", lambda path, words, env: pytest.fail("the server was started"))
    words = ["--port", str(taken), f"model.name={tiny_model_dir}"]
    with pytest.raises(SystemExit) as ended:
        serve.main(words)
    assert ended.value.code == 2
    message = f"error: --port={taken}: another program listens there at 127.0.0.1; "
    assert capsys.readouterr().err == f"{message}end it, or write another --port\n"
    # The command itself can be printed anywhere.
    serve.main(["--print", *words])


@pytest.mark.parametrize(
    ("host", "port", "says"),
    [
        ("0.0.0.0", "taken", "--port=.*: another program listens there at 0.0.0.0"),
        ("::1", "0", "--port=0: it is no port; write a number from 1"),
        ("127.0.0.1", "70000", "--port=70000: it is no port"),
        ("203.0.113.7", "8000", "--host=203.0.113.7: this machine cannot listen there"),
        ("no.such.invalid", "8000", "--host=no.such.invalid: this machine cannot listen there"),
    ],
)
def test_a_port_where_no_server_can_listen_is_refused(host: str, port: str, says: str, taken: int) -> None:
    with pytest.raises(ConfigError, match=says):
        listening.check_port(host, taken if port == "taken" else int(port))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("taken", "another program listens there; end it, or write another --uds"),
        ("file", "this file exists and is no socket"),
        ("link", "this file exists and is no socket"),
        ("no/socket", "nothing can be created in"),
        ("x" * 110, "the path of a socket has at most 107 bytes, and this one has"),
    ],
)
def test_a_socket_where_no_server_can_listen_is_refused(
    name: str, says: str, taken: int, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"--uds={tmp_path}/{name}: {says}"):
        listening.check_socket(tmp_path / name)


def test_a_socket_that_a_killed_server_has_left_is_removed(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(tmp_path / "left"))
    listening.check_socket(tmp_path / "left")
    assert not (tmp_path / "left").exists()
    with socket.create_server(("127.0.0.1", 0)) as ended:
        port = ended.getsockname()[1]
    listening.check_port("127.0.0.1", port)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--host", "0.0.0.0"],
            "--host=0.0.0.0: other machines can reach this server, and VLLM_API_KEY",
        ),
        (
            ["--host", "0.0.0.0", "inference_model.backend=sglang_server"],
            "--host=0.0.0.0: other machines can reach this server, and SGLANG_API_KEY",
        ),
        (
            ["inference_model.backend=sglang_server"],
            "server_python=null: SGLang needs an environment of its own",
        ),
        (["--prt", "3"], "unrecognized arguments: --prt"),
        (["env.nope=1"], "there is no key env.nope"),
        (["model.name=/nowhere"], "model.name=/nowhere: there is no such folder"),
    ],
)
def test_mistakes_are_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        serve.main(words)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1 and says in error
