"""What a training process sets in its environment before torch is imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import ray

from torchrl_grpo.config import Config
from torchrl_grpo.errors import ModelError
from torchrl_grpo.inference.servers.kinds import VLLM
from torchrl_grpo.inference.servers.launch import Launch
from torchrl_grpo.inference.servers.process import ServerProcess
from torchrl_grpo.planning.placement import plan
from torchrl_grpo.planning.plan import Plan
from torchrl_grpo.planning.request import build_request
from torchrl_grpo.rollout.workers import ray_pool
from torchrl_grpo.training.job import _prepare_process

CONF, OLD_CONF = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
GROWS = "expandable_segments:True"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore every variable that is set here. An earlier test may have configured the allocator."""
    for name in ("PATH", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    for name in (CONF, OLD_CONF):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr("torchrl_grpo.training.job.quiet_unused", lambda *_: None)


def planned(gpus: int, backend: str = "vllm") -> tuple[Config, Plan]:
    cfg = Config()
    cfg.inference_model.backend = backend
    return cfg, plan(build_request(cfg, asynchronous=False), gpus)


@pytest.mark.parametrize(
    ("gpus", "backend", "expected"),
    [
        (2, "vllm", GROWS),  # the engine is in another process
        (1, "transformers", GROWS),
        (1, "vllm", ""),  # an engine of vLLM sleeps in this process
        (0, "transformers", ""),
    ],
)
def test_segments_grow_where_no_engine_sleeps(gpus: int, backend: str, expected: str) -> None:
    cfg, chosen = planned(gpus, backend)
    assert chosen.sleeps == (gpus == 1 and backend == "vllm")
    _prepare_process(cfg, chosen)
    assert os.environ[CONF] == expected


def test_another_rank_does_so_before_it_has_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "")
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    _prepare_process(None, None)
    assert os.environ[CONF] == GROWS
    # Rank 0 lists the GPUs in this order.
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def allocator_of_a_server(folder: Path) -> str:
    """Start a process in place of a server, and return its configuration of the allocator."""
    written = folder / "written"
    code = f"import os; open({str(written)!r}, 'w').write(os.environ.get({CONF!r}, 'nothing'))"
    process = ServerProcess(
        VLLM, Launch([sys.executable, "-c", code], {}, ("FOLDER",)), environment={}, log=None
    )
    with pytest.raises(ModelError, match="ended with code 0"):
        process.wait_until_ready(60)
    process.kill()
    return written.read_text()


def allocator_of_ray(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the configuration of the allocator that a cluster of Ray would start with."""
    values: list[str] = []
    monkeypatch.setattr(ray, "init", lambda **_: values.append(os.environ.get(CONF, "nothing")))
    ray_pool._connect(Config(), 1, [])
    return values[0]


def test_only_this_process_has_segments_that_grow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(CONF)
    _prepare_process(*planned(2))
    assert allocator_of_a_server(tmp_path) == allocator_of_ray(monkeypatch) == "nothing"
    assert os.environ[CONF] == GROWS
    monkeypatch.setenv(CONF, "max_split_size_mb:512")
    assert allocator_of_a_server(tmp_path) == allocator_of_ray(monkeypatch) == "max_split_size_mb:512"


@pytest.mark.parametrize("name", [CONF, OLD_CONF])
def test_the_users_own_value_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:512")
    _prepare_process(*planned(2))
    assert os.environ[name] == "max_split_size_mb:512"
    assert {os.environ[CONF], os.environ[OLD_CONF]} == {"max_split_size_mb:512", ""}


def test_programs_beside_python_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    own = str(Path(sys.executable).parent)
    for _ in range(2):
        _prepare_process(*planned(1))
        assert os.environ["PATH"].split(os.pathsep) == ["/usr/bin", own]
