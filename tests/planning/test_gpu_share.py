"""An engine is told the share of its GPU that the plan gives it, wherever it runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchrl_grpo.config import Config
from torchrl_grpo.config.checks import whole as checks
from torchrl_grpo.config.values import Dtype
from torchrl_grpo.inference import vllm_engine
from torchrl_grpo.planning import placement
from torchrl_grpo.planning.request import build_request
from torchrl_grpo.rollout import build
from torchrl_grpo.rollout.workers import ray_pool, ray_worker


class Enough(Exception):
    """The engine was asked for; there is no GPU to make it on."""


@pytest.mark.parametrize(
    ("gpus", "utilization", "share"), [(1, None, 0.4), (1, 0.6, 0.6), (2, None, 0.85), (2, 0.6, 0.6)]
)
def test_share(gpus: int, utilization: float | None, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def engine(source: str, **options: Any) -> None:
        taken.append(options["gpu_memory_utilization"])
        raise Enough

    def pool(cfg: Config, spec: ray_worker.WorkerSpec, *count: int, **others: int) -> None:
        ray_worker.RolloutActor().make_engine(spec)

    monkeypatch.setattr(checks, "cuda_device_present", lambda: True)
    monkeypatch.setattr(vllm_engine, "VLLMEngine", engine)
    monkeypatch.setattr(ray_pool, "RayPool", pool)
    cfg = Config()
    cfg.inference_model.dtype = Dtype("bfloat16")
    cfg.inference_model.gpu_memory_utilization = utilization
    plan = placement.plan(build_request(cfg, asynchronous=False), gpus)
    source = build.EngineSource("weights", "model", plan, [2], 100, torch.bfloat16, True)
    collect: Any = build.build_collector
    with pytest.raises(Enough):
        collect(cfg, source, None, SimpleNamespace(pad_token_id=0))
    assert taken == [share]
