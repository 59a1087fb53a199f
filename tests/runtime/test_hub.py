"""Whether the hub is reached, and for how long a failure counts."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
from huggingface_hub import constants

from torchrl_grpo.runtime import hub

Ask = Callable[[bool], str | None]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Ask:
    """A function that asks for the hub with a network or without, ten seconds after its last call."""
    now, requests = [0.0], []
    monkeypatch.setattr(hub, "_last", None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    # It is removed after the test.
    monkeypatch.setenv("TORCHRL_GRPO_HUB_UNREACHABLE", "")
    monkeypatch.delenv("TORCHRL_GRPO_HUB_UNREACHABLE")
    monkeypatch.delenv("HF_DATASETS_OFFLINE")
    config = types.SimpleNamespace(HF_HUB_OFFLINE=False, HF_DATASETS_OFFLINE=False)
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(config=config))
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def why(network: bool) -> str | None:
        def head(url: str, timeout: float) -> None:
            assert not constants.is_offline_mode(), "the client would refuse"
            requests.append(url)
            if not network:
                raise ConnectionError("no route to host.\nTraceback")

        client: Any = types.SimpleNamespace(head=head)
        monkeypatch.setattr("huggingface_hub.get_session", lambda: client)
        now[0] += 10.0
        reason = hub.why_unreachable()
        offline = reason is not None
        assert os.environ["HF_HUB_OFFLINE"] == str(int(offline))
        assert constants.HF_HUB_OFFLINE is config.HF_HUB_OFFLINE is config.HF_DATASETS_OFFLINE is offline
        return reason

    why.requests = requests  # type: ignore[attr-defined]
    return why


def test_a_failure_counts_for_half_a_minute(ask: Ask) -> None:
    requests = ask.requests  # type: ignore[attr-defined]
    assert ask(False) == "no route to host"
    # The network is back, and the hub is not asked each time.
    assert ask(True) == ask(True) == "no route to host" and len(requests) == 1
    assert ask(True) is None and len(requests) == 2
    # What has answered is not asked again.
    assert ask(False) is None and len(requests) == 2


def test_a_process_that_was_started_without_a_network_asks_too(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask(False) == "no route to host"
    # Another process begins with the environment of this one, and without its answers.
    monkeypatch.setattr(hub, "_last", None)
    assert ask(False) == "no route to host"
    monkeypatch.setattr(hub, "_last", None)
    assert ask(True) is None
    assert ask(False) is None, "it has answered"


def test_a_user_who_is_offline_is_not_contradicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_last", None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.why_unreachable() == "HF_HUB_OFFLINE is set" and hub._last is None
