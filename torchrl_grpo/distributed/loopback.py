"""The meeting point of ranks that are all on this machine, which other machines cannot reach.

That of torch listens at all addresses of the machine, and whoever reaches it can read and change what ranks
say to each other.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from ipaddress import ip_address
from typing import Any

from torch.distributed import DistError, Store, TCPStore  # type: ignore[attr-defined]  # torch does not mark them
from torch.distributed.rendezvous import register_rendezvous_handler

from torchrl_grpo.errors import RanksApart, first_line
from torchrl_grpo.runtime import rank_env, screen
from torchrl_grpo.runtime.interrupts import terminations_end_at_once

_SCHEME = "grpo-loopback"
# Interface at which gloo listens. By default it takes the address that the machine's name has.
_GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
# Seconds after which a rank says that it waits for the others, and after which it gives up. A rank that reads
# much data comes later than the others.
_SILENT_S, _LIMIT = 10.0, timedelta(minutes=10)


@contextmanager
def meeting_point() -> Iterator[dict[str, Any]]:
    """Yield arguments for the function that creates the group of all ranks.

    There are none if ``MASTER_ADDR`` is no loopback address, or if a launcher provides the meeting point. If
    the ranks do not meet soon, this says what is waited for.

    Raises:
        RanksApart: they do not meet.
    """
    (host, port), chosen = _address(), os.environ.get(_GLOO_VARIABLE)
    apart = f"RANK={rank_env.rank()} of WORLD_SIZE={rank_env.world_size()} in the environment"
    waiting = threading.Timer(
        _SILENT_S, screen.say, [f"{apart}: waiting for the other ranks at {host}:{port}; {rank_env.FIX}"]
    )
    waiting.daemon = True
    if rank_env.OWN_LAUNCHER not in os.environ:
        waiting.start()
    alone = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and _is_loopback(host)
    if alone:
        _register()
        os.environ.setdefault(_GLOO_VARIABLE, "lo")
    try:
        # The call that waits never returns to Python, and a launcher would kill this rank after 30 s.
        with terminations_end_at_once():
            yield {"init_method": f"{_SCHEME}://"} if alone else {}
    except (OSError, DistError) as error:
        raise RanksApart(
            f"{apart}: the other ranks were not found at {host}:{port} ({first_line(error)}); {rank_env.FIX}"
        ) from error
    finally:
        waiting.cancel()
        if alone and chosen is None:
            # Other groups of this process may span machines.
            del os.environ[_GLOO_VARIABLE]


def _address() -> tuple[str, int]:
    return os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@cache
def _register() -> None:
    register_rendezvous_handler(_SCHEME, _meet)


def _meet(url: str, timeout: timedelta, **more: Any) -> Iterator[tuple[Store, int, int]]:
    (host, port), rank, size = _address(), rank_env.rank(), rank_env.world_size()
    listening: dict[str, Any] = {}
    if rank == 0:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening["master_listen_fd"] = socket.create_server(
            (host, port), family=family, backlog=size
        ).detach()
    limit = timeout if rank_env.OWN_LAUNCHER in os.environ else _LIMIT
    store = TCPStore(host, port, size, rank == 0, limit, multi_tenant=True, **listening)
    store.set_timeout(timeout)
    yield store, rank, size
