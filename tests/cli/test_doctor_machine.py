"""``grpo-doctor --machine``: each check passes here, and names a fix on a machine that lacks something."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchrl_grpo.cli.doctor import main
from torchrl_grpo.errors import UserError
from torchrl_grpo.runtime import hardware
from torchrl_grpo.runtime.hardware import Hardware
from torchrl_grpo.tools import machine_check
from torchrl_grpo.tools.gpu_check.results import Status
from torchrl_grpo.tools.machine_check import run_check


@pytest.mark.slow
def test_this_machine_passes_and_the_tiny_model_answers(
    tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"model.name={tiny_model_dir}", "inference_model.backend=transformers"]
    with pytest.raises(SystemExit) as ended:
        main(["--machine", "--json", *words])
    results = {result["stage"]: result for result in json.loads(capsys.readouterr().out)}
    assert list(results) == ["versions", "devices", "shared memory", "disk", "ports", "ranks", "engine"]
    # How much room the machine has is not the matter of this test.
    failed = {name for name, result in results.items() if result["status"] != "passed"}
    assert failed <= {"shared memory", "disk"} and ended.value.code == int(bool(failed))
    assert "weights verified" in results["engine"]["figures"]["ok"]
    assert "gloo" in results["ranks"]["figures"]["ok"] or "nccl" in results["ranks"]["figures"]["ok"]


def test_a_version_outside_of_its_range_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ["numpy>=999", "absent-package>=1", "vllm>=999; extra == 'vllm'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: needs)
    with pytest.raises(UserError, match=r"numpy is \S+ and not >=999; absent-package is missing") as error:
        machine_check.versions()
    assert "vllm" not in str(error.value) and "make setup" in str(error.value)


def test_a_missing_gpu_and_little_room_have_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "present", lambda: Hardware())
    monkeypatch.setattr(hardware, "vllm_needs_gpu", lambda: True)
    with pytest.raises(UserError, match=r"no GPU is visible.*ACCELERATOR=cpu"):
        machine_check.devices()
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**26))
    with pytest.raises(UserError, match=r"/dev/shm has 0.06 GiB free.*--shm-size=8g"):
        machine_check.shared()
    with pytest.raises(UserError, match=r"0.06 GiB free, and 5 are needed.*TMPDIR"):
        machine_check.disk()


def test_a_network_that_does_not_work_has_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **words: Any) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(UserError, match=r"127\.0\.0\.1.*not permitted.*interface lo"):
        machine_check.ports()


def test_ranks_that_do_not_meet_have_a_fix_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "present", lambda: Hardware())
    monkeypatch.setattr(machine_check, "_ALL_REDUCE", "raise SystemExit('no interface')")
    with pytest.raises(UserError, match=r"by gloo \(no interface\).*GLOO_SOCKET_IFNAME"):
        machine_check.ranks()
    monkeypatch.setattr(machine_check, "_RANKS_LIMIT_S", 0)
    monkeypatch.setattr(machine_check, "_ALL_REDUCE", "import threading; threading.Event().wait()")
    started: list[subprocess.Popen[str]] = []
    start = subprocess.Popen

    def popen(*args: Any, **words: Any) -> subprocess.Popen[str]:
        started.append(start(*args, **words))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(UserError, match="no answer"):
        machine_check.ranks()
    assert len(started) == 2 and all(process.wait() != 0 for process in started)


def test_what_else_goes_wrong_is_the_result_of_a_check() -> None:
    def fail() -> str:
        raise RuntimeError("no kernel image\nmore")

    result = run_check("engine", fail)
    assert result.status is Status.failed and "RuntimeError: no kernel image;" in result.reason


def test_the_fast_checks_import_no_torch() -> None:
    code = (
        "import sys, torchrl_grpo.tools.machine_check as m; m.versions(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
