"""The builder of a session closes what it opened when a later part fails, and keeps lines for the user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_runs import config  # noqa: F401  fixture

from torchrl_grpo.config import Config
from torchrl_grpo.config.values import Dtype
from torchrl_grpo.inference.transformers_engine import TransformersEngine
from torchrl_grpo.models import precision
from torchrl_grpo.observe import loggers
from torchrl_grpo.observe.metrics import MetricsWriter, RolloutWriter
from torchrl_grpo.planning import placement
from torchrl_grpo.planning.request import build_request
from torchrl_grpo.training.build import MessageQueue, choose_engine_dtype
from torchrl_grpo.training.job import run


def test_what_was_opened_is_closed_when_a_later_part_fails(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    def noting(kind: type) -> None:
        close = kind.close  # type: ignore[attr-defined]

        def noted(self: Any) -> None:
            closed.append(type(self).__name__)
            close(self)

        monkeypatch.setattr(kind, "close", noted)

    def fail(*_: Any) -> None:
        raise ArithmeticError("no logger today")

    for kind in (TransformersEngine, MetricsWriter, RolloutWriter):
        noting(kind)
    monkeypatch.setattr(loggers, "build", fail)
    with pytest.raises(ArithmeticError, match="no logger"):
        run(config, tmp_path / "run")
    assert closed == ["EvaluationWriter", "RolloutWriter", "MetricsWriter", "TransformersEngine"]


def test_messages_wait_for_the_progress_bar_in_their_order() -> None:
    messages = MessageQueue()
    shown: list[str] = []
    messages("first")
    messages(None)
    messages("second")
    messages.attach(shown.append)
    messages("third")
    assert shown == ["first", "second", "third"]


@pytest.mark.parametrize(
    ("fast", "dtype", "expected"),
    [
        ([True, True], "auto", "bfloat16"),
        ([True, False], "auto", "float32"),
        ([False, False], "auto", "float32"),
        ([True, False], "float16", "float16"),
    ],
)
def test_engines_on_gpus_of_several_kinds_have_one_format(
    fast: list[bool], dtype: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "has_fast_bfloat16", lambda device: fast[device.index - 1])
    cfg = Config()
    cfg.inference_model.dtype, cfg.inference_model.num_devices = Dtype(dtype), 2
    plan = placement.plan(build_request(cfg, asynchronous=False), 3)
    assert plan.inference.devices == ("cuda:1", "cuda:2")
    assert choose_engine_dtype(cfg, plan) == expected
