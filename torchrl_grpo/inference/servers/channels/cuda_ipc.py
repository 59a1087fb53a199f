"""A transfer buffer on the trainer's GPU, whose two halves servers of the same machine read in place.

A server gets handles of both halves with the first pass. Each half is then announced in the same way as a
file in shared memory. The trainer waits for its GPU before it announces a half, and a server waits for its
own GPU before it answers. So nobody reads what is being written.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from torch import Tensor

from torchrl_grpo.errors import ConfigError, ModelError
from torchrl_grpo.inference.checksums import checksum
from torchrl_grpo.inference.pieces import Piece
from torchrl_grpo.inference.servers import weight_files
from torchrl_grpo.inference.servers.channels.buffers import SharedMemory
from torchrl_grpo.inference.servers.channels.types import Opening, nothing_to_do
from torchrl_grpo.inference.servers.weight_files import Bucket, pack_pieces, room_for

_KEY = "inference_model.weight_transfer"


def write_half(memory: Tensor, slot: int, pieces: Sequence[Piece], transfer: str) -> Bucket:
    """Copy pieces to a half, and return what a server is told of it.

    Its checksum is read, so all copies are complete on return.

    Raises:
        ModelError: a row of a tensor does not fit.
    """
    size = room_for(pieces)
    if size > len(memory):
        # Only a single row can be larger.
        raise ModelError(
            f"{_KEY}={transfer}: a row of {pieces[0].name} has {size} bytes, and {len(memory)} at most "
            f"travel at a time; write {_KEY}=shared_memory"
        )
    # What lies between two pieces counts for the checksum as well.
    memory[:size].zero_()
    bucket = pack_pieces(pieces, memory, None)
    return replace(bucket, slot=slot, size=size, checksum=checksum(memory[:size]))


class SharedHalves:
    """The trainer's end.

    Args:
        memory: memory of the trainer's GPU.
    """

    # See :class:`Halves`.
    all_in_one_pass = False
    # torch counts the uses of a handle in a file in shared memory.
    on_this_machine = True
    by_cpu = False

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._halves: list[Tensor] = []
        # Number of ranks of each server, and the servers that have the handles.
        self._ranks: dict[Hashable, int] = {}
        self._opened: set[Hashable] = set()

    @property
    def room(self) -> int:
        """See :class:`Halves`."""
        return weight_files.BUCKET_BYTES // 2

    def admit(self, server: Hashable, address: str, gpus: Sequence[str]) -> None:
        """See :meth:`Halves.admit`."""
        own = self._memory.gpu_name()
        for gpu in gpus:
            if not gpu:
                wrong = "computes on a CPU"
            elif gpu != own and not self._memory.reaches(gpu):
                wrong = f"has GPU {gpu}, which does not read the memory of the trainer's, {own}"
            else:
                continue
            raise ConfigError(f"{_KEY}=cuda_ipc: the server at {address} {wrong}; write {_KEY}=shared_memory")
        self._ranks[server] = len(gpus)

    def dismiss(self, server: Hashable) -> None:
        """See :meth:`Halves.dismiss`."""
        self._ranks.pop(server, None)
        self._opened.discard(server)

    def misses_a_server(self, servers: Collection[Hashable]) -> bool:
        """See :meth:`Halves.misses_a_server`."""
        return False

    def open(self, servers: Sequence[Hashable]) -> tuple[Mapping[Hashable, Opening], Future[None]]:
        """See :meth:`Halves.open`."""
        if not self._halves:
            self._halves = [self._memory.allocate(self.room) for _ in range(2)]
        openings = {}
        for server in servers:
            # A server may be dismissed meanwhile. It then opens nothing.
            ranks = self._ranks.get(server, 0)
            if server not in self._opened and ranks:
                self._opened.add(server)
                handles = [[self._memory.export(half) for half in self._halves] for _ in range(ranks)]
                openings[server] = Opening("cuda_ipc", {"of_rank": handles})
        return openings, nothing_to_do()

    def write(self, slot: int, pieces: Sequence[Piece]) -> Bucket:
        """See :meth:`Halves.write`."""
        bucket = write_half(self._halves[slot], slot, pieces, "cuda_ipc")
        self._memory.synchronize()
        return bucket

    def send(self, slot: int, size: int) -> Future[None]:
        """See :meth:`Halves.send`. Servers read it where it is."""
        return nothing_to_do()

    def interrupt(self) -> None:
        """See :meth:`Halves.interrupt`."""

    def close(self) -> None:
        """See :meth:`Halves.close`."""
        self._halves.clear()


class SharedReceiver:
    """A rank's end.

    Args:
        memory: memory of the rank's GPU.
        handles: handles of both halves.
    """

    def __init__(self, memory: SharedMemory, handles: Sequence[list[Any]]) -> None:
        self._memory = memory
        self._halves = [memory.open(handle) for handle in handles]

    def receive(self, slot: int, size: int) -> Tensor | None:
        """See :meth:`Receiver.receive`."""
        return self._halves[slot][:size]

    def wait_until_unused(self) -> None:
        """See :meth:`Receiver.wait_until_unused`."""
        self._memory.synchronize()

    def close(self) -> None:
        """See :meth:`Receiver.close`."""
        self._halves.clear()
