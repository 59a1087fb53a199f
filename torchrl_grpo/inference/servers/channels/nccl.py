"""Weights that are sent from the trainer's GPU to those of all servers, or workers on Ray, at the same time.

The trainer and all ranks of the servers of a pass are a group, in which the trainer is rank 0. The group
stays as long as the same servers read, and is made anew when one of them was started again. If a server
leaves during a pass, the group ends, and the others ask again. On a CPU, gloo takes NCCL's place.

Both ends divide the weights in the same way, so each message is known by its place in the order. A device
packs, sends and loads on the one stream that it computes on. So a message is sent when it is complete, and
loaded when it has arrived, and its memory is used again after that. vLLM's functions for this
(``packed_nccl_broadcast_producer`` and ``_consumer``) are not used: they take whole tensors, which may need
gigabytes, and run on streams of their own, which do not wait for the stream that computes the weights.
"""

from __future__ import annotations

import socket
import threading
import zlib
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from torchrl_grpo.errors import ConfigError
from torchrl_grpo.inference.checksums import checksum_tensor, combine
from torchrl_grpo.inference.layout import Shape
from torchrl_grpo.inference.pieces import Piece
from torchrl_grpo.inference.servers import weight_files
from torchrl_grpo.inference.servers.channels.cuda_ipc import gpu_name
from torchrl_grpo.inference.servers.channels.group import NotTogether, ProcessGroupEnded, WeightGroup
from torchrl_grpo.inference.servers.transfer_types import Channel, Opening
from torchrl_grpo.inference.servers.weight_files import divide, room_for
from torchrl_grpo.inference.servers.weight_stream import WeightStream

_KEY = "inference_model.weight_transfer"
_HERE = "127.0.0.1"
# Seconds within which all processes of a group join it, if they are not given less.
_JOIN_S = 60.0
# Longest time between a broken connection and the notice that the server has exited, in seconds.
_EXIT_NOTICE_S = 30.0


class Broadcaster(Channel):
    """The trainer's end.

    Args:
        device: where the trainer's weights are.
        timeout_s: seconds within which a server must answer.
        receiver: what receives, for messages: a server, or a worker on Ray.
        otherwise: value of ``inference_model.weight_transfer`` with which weights get anywhere, for messages.
    """

    on_this_machine = False
    by_cpu = False

    def __init__(
        self, device: torch.device, timeout_s: float, *, receiver: str = "server", otherwise: str = "folder"
    ) -> None:
        self._device, self._timeout_s = device, min(_JOIN_S, timeout_s)
        self._receiver, self._otherwise = receiver, otherwise
        # By server: the trainer's address as it sees it, and its number of ranks.
        self._servers: dict[Hashable, tuple[str, int]] = {}
        # Servers come and go in other threads.
        self._changing = threading.Lock()
        # Servers of the group, and the group once the trainer has joined it.
        self._members: list[Hashable] = []
        self._group: WeightGroup | None = None

    def admit(self, server: Hashable, address: str, gpus: Sequence[str]) -> None:
        own = gpu_name(self._device)
        if own and own in gpus:
            raise ConfigError(
                f"{_KEY}=nccl: the {self._receiver} at {address} is on the trainer's GPU, and NCCL connects "
                f"different GPUs only; write {_KEY}=cuda_ipc"
            )
        if any(bool(gpu) is not bool(own) for gpu in gpus):
            raise ConfigError(
                f"{_KEY}=nccl: of the trainer and the {self._receiver} at {address}, one computes on a CPU "
                f"and the other on a GPU; write {_KEY}={self._otherwise}, or start the {self._receiver} on "
                "the same kind of device"
            )
        with self._changing:
            self._servers[server] = (own_address(address), len(gpus))

    def dismiss(self, server: Hashable) -> None:
        """See :meth:`Channel.dismiss`. What is being sent to it and others ends."""
        with self._changing:
            self._servers.pop(server, None)
            is_member = server in self._members
        if is_member:
            self._end_group()

    def misses_a_server(self, servers: Collection[Hashable]) -> bool:
        with self._changing:
            return not self._servers.keys() <= set(servers)

    def send(self, weights: Iterable[tuple[str, Tensor]], stream: WeightStream) -> bool:
        """See :meth:`Channel.send`.

        Raises:
            ConfigError: the trainer and the servers cannot be connected.
            RuntimeError: sending failed for another reason.
        """
        servers = stream.readers()
        try:
            room = weight_files.BUCKET_BYTES // 2
            send_weights(weights, self._joined(servers, stream, room), self._device, room)
        except RuntimeError as error:
            # If a server has exited, its broken connection usually shows here first. The notice that the
            # server has exited comes later.
            self._end_group()
            if stream.wait_for(lambda: not self._servers.keys() >= set(servers), _EXIT_NOTICE_S):
                return False
            if isinstance(error, NotTogether):
                raise ConfigError(
                    f"{_KEY}=nccl: the trainer cannot be connected with each {self._receiver} ({error}); "
                    f"write {_KEY}={self._otherwise}"
                ) from error
            raise
        return True

    def _joined(self, servers: Sequence[Hashable], stream: WeightStream, room: int) -> WeightGroup:
        """Tell servers to receive weights, and return the group in which they do."""
        if self._group is not None and set(servers) == set(self._members):
            stream.announce(dict.fromkeys(servers, Opening("nccl", {"room": room})))
            return self._group
        self._end_group()
        with self._changing:
            self._members = members = list(servers)
            known = {server: self._servers[server] for server in servers if server in self._servers}
        # A server on another machine reaches the trainer at an address that those on this one reach as well.
        host = next((host for host, _ in known.values() if host != _HERE), _HERE)
        meeting = {
            "host": host,
            "port": self._free_port(host),
            "size": 1 + sum(ranks for _, ranks in known.values()),
            "timeout_s": self._timeout_s,
        }
        first = 1
        for server, (_, ranks) in known.items():
            stream.announce({server: Opening("nccl", {**meeting, "first": first, "room": room})})
            first += ranks
        group = self._join(meeting, lambda: set(stream.readers()) != set(servers), stream)
        with self._changing:
            if self._members is members:
                self._group = group
                return group
        group.end()
        raise ProcessGroupEnded(f"a {self._receiver} has left while the group was made")

    def _join(
        self, meeting: Mapping[str, Any], has_left: Callable[[], bool], stream: WeightStream
    ) -> WeightGroup:
        joined: Future[WeightGroup] = Future()
        joined.add_done_callback(stream.wake)

        def join() -> None:
            try:
                joined.set_result(WeightGroup(meeting, 0, self._device))
            except Exception as error:  # noqa: BLE001  it is passed on
                joined.set_exception(error)

        # A thread that NCCL never returns to must not hold up the trainer.
        threading.Thread(target=join, name="weight group", daemon=True).start()
        stream.wait_for(lambda: joined.done() or has_left())
        if not joined.done():
            raise NotTogether(f"a {self._receiver} has left before all had come")
        return joined.result()

    def _free_port(self, host: str) -> int:
        try:
            with socket.socket() as listening:
                listening.bind((host, 0))
                port: int = listening.getsockname()[1]
        except OSError as error:
            raise ConfigError(
                f"{_KEY}=nccl: the trainer cannot listen at {host} ({error.strerror}); write "
                f"{_KEY}={self._otherwise}"
            ) from error
        return port

    def _end_group(self) -> None:
        with self._changing:
            group, self._group, self._members = self._group, None, []
        if group is not None:
            group.end()

    def close(self) -> None:
        self._end_group()


def send_weights(
    weights: Iterable[tuple[str, Tensor]], group: WeightGroup, device: torch.device, room: int
) -> None:
    """Send weights to all other ranks of a group, which call :func:`receive_weights`.

    Args:
        weights: names and weights, all of one dtype.
        group: the group.
        device: where the weights are.
        room: size of a message in bytes; only a longer row makes a larger one.

    Raises:
        ProcessGroupEnded: a rank has left.
    """
    digest = _Digest()
    for pieces in divide(weights, room):
        contents = [piece.content.view(torch.uint8) for piece in pieces]
        padding = room_for(pieces) - sum(map(len, contents))
        message = torch.cat([*contents, torch.zeros(padding, dtype=torch.uint8, device=device)])
        digest.add(pieces, message)
        group.broadcast(message)
    group.broadcast(digest.value())
    group.synchronize()


def receive_weights(
    group: WeightGroup, shapes: Mapping[str, Shape], dtype: torch.dtype, device: torch.device, room: int
) -> Iterator[list[Piece]]:
    """Yield the pieces that :func:`send_weights` sends, message by message.

    Args:
        group: the group.
        shapes: shapes of all weights by name, in the order in which they are sent.
        dtype: their dtype.
        device: where the rank's weights are.
        room: as :func:`send_weights` has it.

    Raises:
        ProcessGroupEnded: the trainer or a rank has left.
        RuntimeError: other weights have arrived than were sent. They have all been yielded by then.
    """
    announced = ((name, torch.empty(shape, dtype=dtype, device="meta")) for name, shape in shapes.items())
    digest = _Digest()
    for pieces in divide(announced, room):
        message = torch.empty(room_for(pieces), dtype=torch.uint8, device=device)
        group.broadcast(message)
        digest.add(pieces, message)
        sizes = [piece.content.nbytes for piece in pieces]
        contents = message[: sum(sizes)].split(sizes)
        yield [replace(piece, content=part.view(dtype)) for piece, part in zip(pieces, contents, strict=True)]
    expected = torch.empty(1, dtype=torch.int64, device=device)
    group.broadcast(expected)
    group.synchronize()
    if not torch.equal(digest.value(), expected):
        raise RuntimeError("the weights that arrived have other names or another checksum than those sent")


class _Digest:
    """A checksum of messages and of what they hold."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []
        self._names = 0

    def add(self, pieces: Iterable[Piece], message: Tensor) -> None:
        # On the device: nothing waits for it.
        self._sums.append(checksum_tensor(message))
        for piece in pieces:
            self._names = zlib.crc32(repr((piece.name, piece.shape, piece.first)).encode(), self._names)

    def value(self) -> Tensor:
        return (combine(torch.stack(self._sums)) + self._names).reshape(1)


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
        address: str = udp.getsockname()[0]
    return address
