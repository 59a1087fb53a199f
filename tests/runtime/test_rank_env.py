"""What a process knows of the training ranks, and the port at which they meet."""

from __future__ import annotations

import socket

import pytest

from torchrl_grpo.runtime import rank_env


def test_a_port_is_free_and_not_one_that_the_kernel_gives_to_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Taken:
        def sample(self, ports: range, count: int) -> list[int]:
            assert ports.stop <= 32_768
            return [taken, free]

    with socket.socket() as other, socket.socket() as mine:
        other.bind(("127.0.0.1", 0))
        taken = other.getsockname()[1]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            free = probe.getsockname()[1]
        monkeypatch.setattr("random.SystemRandom", Taken)
        assert rank_env.free_port() == free
        mine.bind(("127.0.0.1", free))
