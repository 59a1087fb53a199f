"""What a process knows of the training ranks, and the port at which they meet."""

from __future__ import annotations

import socket

import pytest

from torchrl_grpo.errors import RanksApart
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


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK=one in the environment is no number"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE=-1 in the environment is no number"),
        ({"RANK": "3"}, "RANK=3 in the environment is no rank of WORLD_SIZE=1"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 in the environment is no rank of WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "WORLD_SIZE=2 and no MASTER_ADDR"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "WORLD_SIZE=2 and no MASTER_PORT"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT=x in the environment is no number"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(
    variables: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in rank_env.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    rank_env.check()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        RanksApart, match=f"{says}.*; start all ranks with a launcher .* `unset RANK WORLD_SIZE"
    ):
        rank_env.check()
    good = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
    for name, value in good.items():
        monkeypatch.setenv(name, value)
    rank_env.check()
