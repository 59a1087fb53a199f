"""The builder of a session closes what it opened when a later part fails, and keeps lines for the user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_runs import config  # noqa: F401  fixture

from torchrl_grpo.config import Config
from torchrl_grpo.inference.transformers_engine import TransformersEngine
from torchrl_grpo.observe import loggers
from torchrl_grpo.observe.metrics import MetricsWriter, RolloutWriter
from torchrl_grpo.training.build import MessageQueue
from torchrl_grpo.training.job import run


def test_what_was_opened_is_closed_when_a_later_part_fails(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    def noting(kind: type) -> None:
        close = kind.close  # type: ignore[attr-defined]

        def noted(self: Any) -> None:
            closed.append(kind.__name__)
            close(self)

        monkeypatch.setattr(kind, "close", noted)

    def fail(*_: Any) -> None:
        raise ArithmeticError("no logger today")

    for kind in (TransformersEngine, MetricsWriter, RolloutWriter):
        noting(kind)
    monkeypatch.setattr(loggers, "build", fail)
    with pytest.raises(ArithmeticError, match="no logger"):
        run(config, tmp_path / "run")
    assert closed == ["RolloutWriter", "MetricsWriter", "TransformersEngine"]


def test_messages_wait_for_the_progress_bar_in_their_order() -> None:
    messages = MessageQueue()
    shown: list[str] = []
    messages("first")
    messages(None)
    messages("second")
    messages.attach(shown.append)
    messages("third")
    assert shown == ["first", "second", "third"]
