"""A transfer buffer on the trainer's GPU, whose halves are sent to the GPUs of all servers at the same time.

The trainer and all ranks of the servers of a pass are a group, in which the trainer is rank 0. The group
stays as long as the same servers read, and is made anew when one of them was started again. If a server
leaves during a pass, the pass is interrupted for the others, which then ask again. On a CPU, gloo takes
NCCL's place.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from torchrl_grpo.errors import ConfigError, ModelError
from torchrl_grpo.inference.pieces import Piece
from torchrl_grpo.inference.servers import weight_files
from torchrl_grpo.inference.servers.channels.buffers import gpu_name
from torchrl_grpo.inference.servers.channels.cuda_ipc import write_half
from torchrl_grpo.inference.servers.channels.groups import Membership
from torchrl_grpo.inference.servers.channels.types import Opening, nothing_to_do
from torchrl_grpo.inference.servers.weight_files import Bucket

_KEY = "inference_model.weight_transfer"
_HERE = "127.0.0.1"


class SentHalves:
    """The trainer's end.

    Args:
        device: where the trainer's weights are.
        timeout_s: seconds within which all servers must have joined the group.
    """

    # See :class:`Halves`.
    all_in_one_pass = True
    on_this_machine = False
    by_cpu = False

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self._device, self._timeout_s = device, timeout_s
        self._halves: list[Tensor] = []
        # By server: the trainer's address as it sees it, and its number of ranks.
        self._servers: dict[Hashable, tuple[str, int]] = {}
        # Servers come and go in other threads.
        self._changing = threading.Lock()
        # Servers of the group, and the group once the trainer has joined it.
        self._members: list[Hashable] = []
        self._membership: Membership | None = None

    @property
    def room(self) -> int:
        """See :class:`Halves`."""
        return weight_files.BUCKET_BYTES // 2

    def admit(self, server: Hashable, address: str, gpus: Sequence[str]) -> None:
        """See :meth:`Halves.admit`."""
        own = gpu_name(self._device)
        if own and own in gpus:
            raise ConfigError(
                f"{_KEY}=nccl: the server at {address} is on the trainer's GPU, and NCCL connects different "
                f"GPUs only; write {_KEY}=cuda_ipc"
            )
        if any(bool(gpu) is not bool(own) for gpu in gpus):
            raise ConfigError(
                f"{_KEY}=nccl: of the trainer and the server at {address}, one computes on a CPU and the "
                f"other on a GPU; write {_KEY}=folder, or start the server on the same kind of device"
            )
        with self._changing:
            self._servers[server] = (own_address(address), len(gpus))

    def dismiss(self, server: Hashable) -> None:
        """See :meth:`Halves.dismiss`."""
        with self._changing:
            self._servers.pop(server, None)

    def misses_a_server(self, servers: Collection[Hashable]) -> bool:
        """See :meth:`Halves.misses_a_server`."""
        with self._changing:
            return not self._servers.keys() <= set(servers)

    def open(self, servers: Sequence[Hashable]) -> tuple[Mapping[Hashable, Opening], Future[None]]:
        """See :meth:`Halves.open`."""
        if not self._halves:
            self._halves = [torch.empty(self.room, dtype=torch.uint8, device=self._device) for _ in range(2)]
        if self._membership is not None and set(servers) == set(self._members):
            return {}, nothing_to_do()
        self._leave()
        with self._changing:
            known = {server: self._servers[server] for server in servers if server in self._servers}
        # A server on another machine reaches the trainer at an address that those on this one reach as well.
        host = next((host for host, _ in known.values() if host != _HERE), _HERE)
        size, port = 1 + sum(ranks for _, ranks in known.values()), _free_port(host)
        openings, first = {}, 1
        for server, (_, ranks) in known.items():
            place = {"host": host, "port": port, "first": first, "size": size, "timeout_s": self._timeout_s}
            openings[server] = Opening("nccl", place)
            first += ranks

        def join() -> None:
            self._membership = Membership(host, port, 0, size, device=self._device, timeout_s=self._timeout_s)

        self._members = list(servers)
        return openings, self._in_thread(join)

    def write(self, slot: int, pieces: Sequence[Piece]) -> Bucket:
        """See :meth:`Halves.write`."""
        bucket = write_half(self._halves[slot], slot, pieces, "nccl")
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return bucket

    def send(self, slot: int, size: int) -> Future[None]:
        """See :meth:`Halves.send`."""
        membership = self._membership
        assert membership is not None, "open comes first"

        def broadcast() -> None:
            if not membership.broadcast(self._halves[slot][:size]):
                raise ModelError(f"{_KEY}=nccl: the group of trainer and servers has ended")

        return self._in_thread(broadcast)

    def interrupt(self) -> None:
        """See :meth:`Halves.interrupt`."""
        self._leave()

    def _leave(self) -> None:
        with self._changing:
            membership, self._membership, self._members = self._membership, None, []
        if membership is not None:
            membership.end()

    def _in_thread(self, work: Callable[[], None]) -> Future[None]:
        done: Future[None] = Future()

        def run() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001  it is passed on
                done.set_exception(error)
            else:
                done.set_result(None)

        # A thread that NCCL never returns to must not hold up the end of the process.
        threading.Thread(target=run, name="weights", daemon=True).start()
        return done

    def close(self) -> None:
        """See :meth:`Halves.close`."""
        self._leave()
        self._halves.clear()


class SentReceiver:
    """A rank's end.

    Args:
        device: where the rank's weights are.
        rank: its number in the group.
        place: content of the :class:`Opening`.
    """

    def __init__(self, device: torch.device, rank: int, place: Mapping[str, Any]) -> None:
        self._device = device
        self._membership = Membership(
            place["host"],
            place["port"],
            place["first"] + rank,
            place["size"],
            device=device,
            timeout_s=place["timeout_s"],
        )
        # The next half comes when this one is loaded, so one buffer takes both.
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def receive(self, slot: int, size: int) -> Tensor | None:
        """See :meth:`Receiver.receive`."""
        if len(self._buffer) < size:
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        content = self._buffer[:size]
        return content if self._membership.broadcast(content) else None

    def wait_until_unused(self) -> None:
        """See :meth:`Receiver.wait_until_unused`."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """See :meth:`Receiver.close`."""
        self._membership.leave()


def own_address(server: str) -> str:
    """Return this machine's address as a server sees it.

    Args:
        server: address of the server, as :class:`ServerConnection` takes it.
    """
    host, port = urlsplit(server).hostname, urlsplit(server).port or 80
    if server.startswith("unix:") or host is None:
        return _HERE
    family, *_, target = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_DGRAM)[0]
    # Nothing is sent: the system only looks up the route.
    with socket.socket(family, socket.SOCK_DGRAM) as udp:
        udp.connect(target)
        found: str = udp.getsockname()[0]
    return found


def _free_port(host: str) -> int:
    try:
        with socket.socket() as listening:
            listening.bind((host, 0))
            port: int = listening.getsockname()[1]
    except OSError as error:
        raise ConfigError(
            f"{_KEY}=nccl: the trainer cannot listen at {host} ({error.strerror}); write {_KEY}=folder"
        ) from error
    return port
