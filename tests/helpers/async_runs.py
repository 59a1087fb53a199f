"""Asynchronous runs with workers that are threads of the test's process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from local_pool import LocalPool, collect_locally

from torchrl_grpo.config import Config
from torchrl_grpo.rollout import build
from torchrl_grpo.tools.verify_resume import read
from torchrl_grpo.training.job import run_async

AsyncRunner = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def pools() -> list[LocalPool]:
    return []


@pytest.fixture
def train(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pools: list[LocalPool]
) -> AsyncRunner:
    """Like the synchronous fixture; ``options`` are those of the pool."""

    def runs(name: str, options: dict[str, Any] | None = None, **changes: object) -> list[dict[str, Any]]:
        for key, value in changes.items():
            group, _, leaf = key.partition("__")
            setattr(getattr(config, group) if leaf else config, leaf or group, value)
        monkeypatch.setattr(build, "collector_with_ray_workers", collect_locally(pools, **(options or {})))
        run_async(config, tmp_path / name)
        return read(tmp_path / name / "metrics.jsonl")

    return runs
