"""What a training process sets in its environment before torch is imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from torchrl_grpo.config import Config
from torchrl_grpo.config.values import Backend
from torchrl_grpo.planning.placement import plan
from torchrl_grpo.planning.plan import Plan
from torchrl_grpo.planning.request import build_request
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
    cfg.inference_model.backend = Backend(backend)
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


def test_another_rank_does_so_before_it_has_a_plan() -> None:
    _prepare_process(None, None)
    assert os.environ[CONF] == GROWS


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
