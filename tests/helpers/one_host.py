"""Fixture for which the process of episodes is started once, for the prompts and then for the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from torchrl_grpo.config import Config
from torchrl_grpo.envs.episodes import build, offers
from torchrl_grpo.envs.episodes.processes import EpisodeHost
from torchrl_grpo.envs.episodes.tools.tool import Tool

OpenHost = Callable[[Config, Sequence[Tool]], EpisodeHost]


@pytest.fixture
def one_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenHost]:
    """The test has one list of tools and one environment. Importing what they need takes most of the time."""
    hosts: list[EpisodeHost] = []

    def open_once(cfg: Config, own_tools: Sequence[Tool]) -> EpisodeHost:
        if not hosts:
            host = offers.open_host(cfg, own_tools)
            assert host is not None
            hosts.append(host)
            monkeypatch.setattr(host, "close", lambda: None)
        return hosts[0]

    monkeypatch.setattr(build, "open_host", open_once)
    yield open_once
    for host in hosts:
        EpisodeHost.close(host)
