"""How a pool of servers chooses what brings weights to them, if the faster way fails its trial."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from torchrl_grpo.config import Config
from torchrl_grpo.config.values import WeightTransfer
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.inference.servers.carriers import Carrier, CopyCarrier, StreamCarrier
from torchrl_grpo.inference.servers.channels import trial
from torchrl_grpo.inference.servers.weight_stream import Segments, WeightStream
from torchrl_grpo.rollout.workers.server_pool import ServerPool, ServerSpec

GPU = torch.device("cuda:0")


def make_pool(way: str, chosen: str, age: int = 0) -> ServerPool:
    cfg = Config()
    cfg.inference_model.weight_transfer = WeightTransfer(chosen)
    cfg.collector.max_policy_age = age
    spec = ServerSpec(cfg, "model", [], [0], 1, way, GPU, GPU, 4, 1, 0.5, [0], 100, 1.0)
    pool = ServerPool(spec, 1)
    pool._members = [Mock()]
    return pool


def fails(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> list[Any]:
    """Have trials return ``error``; returns what was tried."""
    tried: list[Any] = []

    def trial_error(carrier: Carrier, takes: dict[Any, Callable[[Any], None]], device: torch.device) -> Any:
        tried.append((carrier, len(takes), device))
        return error

    monkeypatch.setattr(trial, "trial_error", trial_error)
    return tried


@pytest.mark.parametrize("age", [0, 2])
def test_weights_go_through_shared_memory_if_the_trial_fails(
    age: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = fails(monkeypatch, RuntimeError("no such memory"))
    pool = make_pool("cuda_ipc", "auto", age)
    shares = pool.carrier
    for _ in range(2):
        pool.put_weights([])
    assert tried == [(shares, 1, GPU)], "once, before the first weights"
    assert isinstance(pool.carrier, CopyCarrier if age else StreamCarrier)
    assert age or isinstance(vars(pool.carrier)["_channel"], Segments)
    output = capsys.readouterr().err
    assert output.count("warning: weights go by shared memory") == 1
    assert "cuda_ipc: a trial before the first weights failed (RuntimeError: no such memory)" in output
    pool.carrier.close()


def test_a_gpu_out_of_reach_counts_as_a_trial_that_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = fails(monkeypatch, None)
    pool = make_pool("cuda_ipc", "auto")
    monkeypatch.setattr(pool.carrier, "admit", refuses)
    pool.admit(Mock(), "unix:/one", ["GPU-7"])
    pool.put_weights([])
    assert tried == [] and "warning: weights go by shared memory" in capsys.readouterr().err
    pool.carrier.close()
    chosen_pool = make_pool("cuda_ipc", "cuda_ipc")
    monkeypatch.setattr(chosen_pool.carrier, "admit", refuses)
    with pytest.raises(ConfigError, match="out of reach"):
        chosen_pool.admit(Mock(), "unix:/one", ["GPU-7"])


def refuses(*arguments: Any) -> None:
    raise ConfigError("inference_model.weight_transfer=cuda_ipc: out of reach")


@pytest.mark.parametrize(
    ("way", "chosen", "otherwise"),
    [("cuda_ipc", "cuda_ipc", "shared_memory"), ("nccl", "nccl", "folder"), ("nccl", "auto", "folder")],
)
def test_what_the_user_chose_ends_the_run(
    way: str, chosen: str, otherwise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers of other machines do not see the memory of this one."""
    fails(monkeypatch, RuntimeError("no route"))
    pool = make_pool(way, chosen)
    with pytest.raises(ConfigError, match=rf"={way}: .*\(RuntimeError: no route\); write .*={otherwise}"):
        pool.put_weights([])


def test_a_trial_that_succeeds_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = fails(monkeypatch, None)
    pool = make_pool("cuda_ipc", "auto")
    assert isinstance(pool.put_weights([]), WeightStream) and isinstance(pool.put_weights([]), WeightStream)
    assert len(tried) == 1
    host = make_pool("shared_memory", "auto")
    host.put_weights([])
    assert len(tried) == 1
    host.carrier.close()
