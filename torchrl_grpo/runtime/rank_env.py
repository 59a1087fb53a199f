"""Reads the rank of this process from the environment that ``torchrun`` and ``accelerate launch`` set."""

from __future__ import annotations

import os
import random
import socket

from torchrl_grpo.errors import RanksApart

# What launchers set.
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Set in ranks that a command of this project has started, which ends them if one ends.
OWN_LAUNCHER = "TORCHRL_GRPO_LAUNCHER"
_NUMBERS = (*VARIABLES[:4], VARIABLES[5])
# What to do about variables that are wrong.
FIX = (
    "start all ranks with a launcher (docs/ranks.md), or, if another job has left these variables, run "
    f"`unset {' '.join(VARIABLES)}`"
)


def check() -> None:
    """Check what the environment says of this process.

    Raises:
        RanksApart: it makes no sense.
    """
    for name in _NUMBERS:
        if not (text := os.environ.get(name, "0")).isdecimal():
            raise RanksApart(f"{name}={text} in the environment is no number; {FIX}")
    if rank() >= max(1, world_size()):
        raise RanksApart(f"RANK={rank()} in the environment is no rank of WORLD_SIZE={world_size()}; {FIX}")
    for name in ("MASTER_ADDR", "MASTER_PORT") if launched() else ():
        if not os.environ.get(name):
            raise RanksApart(
                f"the environment has WORLD_SIZE={world_size()} and no {name}, where ranks meet; {FIX}"
            )


def launched() -> bool:
    """Whether a launcher started this process as one of several ranks."""
    return world_size() > 1


def rank() -> int:
    """Number of this process among the training ranks; rank 0 collects, logs and saves."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Number of this process among the ranks of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """Number of training ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def world_size() -> int:
    """Number of training ranks; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def free_port() -> int:
    """Return a free port of this machine for ``MASTER_PORT``.

    Rank 0 listens there seconds later, when it has imported torch. Linux gives ports from 32768 on to
    connections of any process, so the port lies below.

    Raises:
        OSError: no port is free.
    """
    ports = random.SystemRandom().sample(range(20_000, 32_000), 100)
    for port in ports[:-1]:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", ports[-1]))
    return ports[-1]
