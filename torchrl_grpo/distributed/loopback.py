"""The meeting point of ranks that are all on this machine, which other machines cannot reach.

That of torch listens at all addresses of the machine, and whoever reaches it can read and change what ranks
say to each other.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from ipaddress import ip_address
from typing import Any

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # torch does not mark them
from torch.distributed.rendezvous import register_rendezvous_handler

from torchrl_grpo.runtime import rank_env

_SCHEME = "grpo-loopback"
# Interface at which gloo listens. By default it takes the address that the machine's name has.
_GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"


@contextmanager
def meeting_point() -> Iterator[dict[str, Any]]:
    """Yield arguments for the function that creates the group of all ranks.

    There are none if ``MASTER_ADDR`` is no loopback address, or if a launcher provides the meeting point.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or not _is_loopback(_address()[0]):
        yield {}
        return
    _register()
    chosen = os.environ.get(_GLOO_VARIABLE)
    os.environ.setdefault(_GLOO_VARIABLE, "lo")
    try:
        yield {"init_method": f"{_SCHEME}://"}
    finally:
        if chosen is None:
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
    yield TCPStore(host, port, size, rank == 0, timeout, multi_tenant=True, **listening), rank, size
