"""``grpo-serve``: the command that it runs, and mistakes."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from torchrl_grpo.cli import serve
from torchrl_grpo.config import Config
from torchrl_grpo.config.values import KEY_VARIABLE
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
    found = shlex.split(line)
    assert f"{KEY_VARIABLE}=YOUR_KEY" in found
    given = dict(itertools.pairwise(found))
    assert given["--model"] == str(tiny_model_dir) and given["--port"] == "8123"
    assert given["--host"] == "127.0.0.1" and given["--dtype"] == "float32"
    assert given["--max-model-len"] == "300" and given["--max-num-seqs"] == "128"
    assert given["--middleware"].endswith("RequireKey")
    # An older vLLM gets the routes by another middleware.
    assert ("--enable-scale-out" in found) is has_token_server()
    assert any(word.endswith("OlderRoutes") for word in found) is not has_token_server()


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
    ((found, env),) = seen
    assert found[:2] == [sys.executable, "-P"] and found[2].endswith("sglang/program.py")
    given = dict(itertools.pairwise(found))
    assert given["--model-path"] == str(tiny_model_dir) and given["--port"] == "8000"
    assert given["--context-length"] == "300" and given["--max-running-requests"] == "128"
    assert given["--dtype"] == "bfloat16" and "--enable-fp32-lm-head" in found
    assert given["--device"] == "cpu" and given["--schedule-policy"] == "lpm"
    assert given["--custom-weight-loader"].endswith("loader.answer")
    # Keys and values of two layers, two heads of 32 numbers in two bytes each: 512 bytes a token.
    assert int(given["--max-total-tokens"]) == 2**30 // 512
    assert env["SGLANG_API_KEY"] == "mine" and "mine" not in " ".join(found) + capsys.readouterr().out
    assert env["PYTHONPATH"] == ""


def test_sglang_on_a_gpu_honors_seeds(tiny_model_dir: Path) -> None:
    cfg = Config()
    cfg.model.name = str(tiny_model_dir)
    share: dict[str, Any] = {"max_num_seqs": 8, "gpu_memory_utilization": 0.5}
    found = sglang_arguments(cfg, torch.device("cuda"), **share)
    assert found["enable_deterministic_inference"] is True and found["mem_fraction_static"] == 0.5
    assert "device" not in found and "max_total_tokens" not in found
    cfg.inference_model.engine_args = {"enable_deterministic_inference": False}
    assert sglang_arguments(cfg, torch.device("cuda"), **share)["enable_deterministic_inference"] is False


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
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1 and says in said
