"""Reads the rank of this process from the environment that ``torchrun`` and ``accelerate launch`` set."""

from __future__ import annotations

import os
import random
import socket


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
