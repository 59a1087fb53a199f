"""A transfer buffer on the trainer's GPU, whose two halves are read in place by servers and workers on Ray.

They must be on the trainer's machine. Such a process need not see the trainer's GPU: CUDA opens handles of
memory of GPUs that a process does not see, if its own GPU can read that memory.

A server gets a handle of the buffer with the first pass. Each half is then announced in the same way as a
file in shared memory. The trainer waits for its GPU before it announces a half, and a server waits for its
own GPU before it answers. So nobody reads what is being written.

torch counts the uses of a handle, so each process gets one of its own. Handles travel as JSON, because a
server that accepts pickled ones would run code that anybody sends to it.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from torchrl_grpo.errors import ConfigError, ModelError
from torchrl_grpo.inference.checksums import checksum
from torchrl_grpo.inference.pieces import Piece
from torchrl_grpo.inference.servers import weight_files
from torchrl_grpo.inference.servers.transfer_types import Opening
from torchrl_grpo.inference.servers.weight_files import Bucket, pack_pieces, read_bucket, room_for
from torchrl_grpo.inference.servers.weight_stream import Halves
from torchrl_grpo.runtime.hardware import ALLOCATOR_VARIABLES

_KEY = "inference_model.weight_transfer"
_OFF = "expandable_segments:False"
# Arguments of :func:`rebuild_cuda_tensor` that say which memory it is. Those before them say what the tensor
# looks like.
_FIRST_OF_HANDLE = 7


def gpu_name(device: torch.device) -> str:
    """Return the UUID of a GPU, which names it on every machine; an empty text for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


class SharedHalves(Halves):
    """The trainer's end.

    Args:
        device: the trainer's GPU.
        receiver: what reads, for messages: a server, or a worker on Ray.
        otherwise: value of ``inference_model.weight_transfer`` with which weights go through the host.
    """

    # torch counts the uses of a handle in a file in shared memory.
    on_this_machine = True
    by_cpu = False

    def __init__(
        self, device: torch.device, *, receiver: str = "server", otherwise: str = "shared_memory"
    ) -> None:
        self._device, self._receiver, self._otherwise = device, receiver, otherwise
        self._buffer = torch.empty(0, dtype=torch.uint8)
        # Number of ranks of each server, and the servers that have a handle.
        self._ranks: dict[Hashable, int] = {}
        self._opened: set[Hashable] = set()

    @property
    def room(self) -> int:
        return weight_files.BUCKET_BYTES // 2

    def admit(self, server: Hashable, address: str, gpus: Sequence[str]) -> None:
        own = gpu_name(self._device)
        for gpu in gpus:
            if not gpu:
                wrong = "computes on a CPU"
            elif gpu != own and not _reads_memory(gpu, self._device):
                wrong = f"has GPU {gpu}, which does not read the memory of the trainer's, {own}"
            else:
                continue
            raise ConfigError(
                f"{_KEY}=cuda_ipc: the {self._receiver} at {address} {wrong}; write {_KEY}={self._otherwise}"
            )
        self._ranks[server] = len(gpus)

    def dismiss(self, server: Hashable) -> None:
        self._ranks.pop(server, None)
        self._opened.discard(server)

    def open(self, servers: Sequence[Hashable]) -> Mapping[Hashable, Opening]:
        if not len(self._buffer):
            with _without_expandable_segments():
                self._buffer = torch.empty(2 * self.room, dtype=torch.uint8, device=self._device)
        openings = {}
        for server in servers:
            # A server may be dismissed meanwhile. It then opens nothing.
            ranks = self._ranks.get(server, 0)
            if server not in self._opened and ranks:
                self._opened.add(server)
                handles = [_export(self._buffer) for _ in range(ranks)]
                openings[server] = Opening("cuda_ipc", {"of_rank": handles})
        return openings

    def write(self, slot: int, pieces: Sequence[Piece]) -> Bucket:
        size, half = room_for(pieces), self._buffer.chunk(2)[slot]
        if size > len(half):
            # Only a single row can be larger.
            raise ModelError(
                f"{_KEY}=cuda_ipc: a row of {pieces[0].name} has {size} bytes, and {len(half)} at most "
                f"travel at a time; write {_KEY}={self._otherwise}"
            )
        # What lies between two pieces counts for the checksum as well.
        half[:size].zero_()
        bucket = replace(
            pack_pieces(pieces, half, None), slot=slot, size=size, checksum=checksum(half[:size])
        )
        torch.cuda.synchronize(self._device)
        return bucket

    def close(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)


class OpenedHalves:
    """A rank's end.

    Args:
        opening: content of an :class:`Opening`.
        device: GPU of the rank.
        rank: number of the rank in its server.
    """

    def __init__(self, opening: Mapping[str, Any], device: torch.device, rank: int) -> None:
        self._device = device
        self._buffer = _open(opening["of_rank"][rank], device)

    def read(self, bucket: Bucket) -> Iterator[Piece]:
        """Yield the pieces in a half, which must be what was announced. They share its memory.

        Raises:
            RuntimeError: the half is another one.
        """
        assert bucket.slot is not None
        content = self._buffer.chunk(2)[bucket.slot][: bucket.size]
        if checksum(content) != bucket.checksum:
            raise RuntimeError(
                f"half {bucket.slot} of the weights has {len(content)} bytes with another checksum than "
                "announced"
            )
        return read_bucket(bucket, content)

    def wait_until_unused(self) -> None:
        """Block until nothing reads the pieces any more."""
        torch.cuda.synchronize(self._device)


def _export(memory: Tensor) -> list[Any]:
    """Return a handle as JSON, with which one other process can open the memory once."""
    _, arguments = reduce_tensor(memory)
    return [
        len(memory),
        memory.storage_offset(),
        *(
            {"base64": base64.b64encode(argument).decode()} if isinstance(argument, bytes) else argument
            for argument in arguments[_FIRST_OF_HANDLE:]
        ),
    ]


def _open(handle: Sequence[Any], device: torch.device) -> Tensor:
    """Return the bytes of another process, as memory of this process's GPU, which reads them."""
    size, offset, *arguments, _ = (
        base64.b64decode(argument["base64"]) if isinstance(argument, dict) else argument
        for argument in handle
    )
    layout = (torch.Tensor, (size,), (1,), offset, torch.UntypedStorage, torch.uint8, device.index)
    # No event of another GPU is waited for: the trainer announces a half when its GPU has written it.
    opened: Tensor = rebuild_cuda_tensor(*layout, *[*arguments, False])
    return opened


def _reads_memory(name: str, device: torch.device) -> bool:
    """Return whether the GPU with this UUID reads the memory of ``device``.

    A GPU that this process does not see is out of reach.
    """
    for index in range(torch.cuda.device_count()):
        if gpu_name(torch.device("cuda", index)) == name:
            return index == device.index or torch.cuda.can_device_access_peer(index, device.index)
    return False


@contextmanager
def _without_expandable_segments() -> Iterator[None]:
    """Let torch allocate in segments of fixed sizes.

    A handle of an expandable segment is a file descriptor, which another process takes out of this one. That
    needs the system call ``pidfd_getfd``, which containers often forbid, and it is slow.
    """
    settings = next((os.environ[name] for name in ALLOCATOR_VARIABLES if os.environ.get(name)), "")
    if "expandable_segments:True" not in settings:
        yield
        return
    torch._C._accelerator_setAllocatorSettings(f"{settings},{_OFF}")
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)
