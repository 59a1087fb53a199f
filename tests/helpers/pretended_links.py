"""Links between pretended GPUs: CUDA's memory handles, and NCCL's library behind vLLM's own communicator.

Both are replaced at the lowest level, inside ``with PretendedCuda(...)``. torch's functions that share
tensors and vLLM's process group and communicator are the real ones. All processes of a group are threads of
this one.
"""

from __future__ import annotations

import ctypes
import itertools
import queue
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
from pretended_cuda import device_of, put_on

# Imported before a GPU is pretended: vLLM's annotations name classes that are replaced then.
from vllm.distributed.device_communicators import pynccl

from torchrl_grpo.inference.servers.channels import group


@contextmanager
def shared_memory(peers: bool = True) -> Iterator[list[bytes]]:
    """Let CUDA's handles open memory of this machine; yields the handles that were opened.

    Args:
        peers: whether GPUs read each other's memory.
    """
    opened: list[bytes] = []
    numbers = itertools.count()

    def share(storage: Any) -> tuple[Any, ...]:
        manager, name, size = storage._share_filename_cpu_()
        # torch opens a handle once in each process, and this one has the place of several.
        handle = b"|".join((manager, name, b"%d" % next(numbers)))
        # Then come size, offset, counter and its offset, event, and whether to wait for it.
        return 0, handle, size, 0, b"counter", 0, b"event", True

    def open_shared(device: int, handle: bytes, size: int, *rest: Any) -> torch.UntypedStorage:
        assert rest == (0, b"counter", 0, b"event", False), "no event of another GPU is waited for"
        opened.append(handle)
        manager, name, _ = handle.split(b"|")
        storage: torch.UntypedStorage = torch.UntypedStorage._new_shared_filename_cpu(manager, name, size)
        put_on(torch.empty(0, dtype=torch.uint8).set_(storage), torch.device("cuda", device))
        return storage

    where = property(lambda storage: device_of(torch.empty(0, dtype=torch.uint8).set_(storage)))
    with ExitStack() as stack:
        for owner, name, value in (
            (torch.UntypedStorage, "device", where),
            (torch.UntypedStorage, "_share_cuda_", share),
            (torch.UntypedStorage, "_new_shared_cuda", staticmethod(open_shared)),
            (torch.UntypedStorage, "_release_ipc_counter", staticmethod(lambda *args, **kwargs: None)),
            (torch.cuda, "_lazy_init", lambda: None),
            (torch.cuda, "can_device_access_peer", lambda gpu, other: peers),
        ):
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        yield opened


class _Nccl:
    """What vLLM calls of NCCL's library. A communicator has a queue of what its root has sent."""

    _changed = threading.Condition()
    _groups: ClassVar[dict[bytes, dict[int, SimpleNamespace]]] = {}

    def __init__(self, path: str | None) -> None:
        pass

    def ncclGetRawVersion(self) -> int:
        return 22800

    def ncclGetVersion(self) -> str:
        return "2.28.0"

    def ncclGetUniqueId(self) -> Any:
        from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId

        unique = ncclUniqueId()
        with self._changed:
            for place, byte in enumerate(len(self._groups).to_bytes(8, "little")):
                unique.internal[place] = byte
            self._groups[bytes(unique)] = {}
        return unique

    def ncclCommInitRank(self, size: int, unique: Any, rank: int) -> SimpleNamespace:
        comm = SimpleNamespace(rank=rank, size=size, group=bytes(unique), queue=queue.SimpleQueue())
        comm.aborted = threading.Event()
        with self._changed:
            members = self._groups[comm.group]
            members[rank] = comm
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: len(members) == size, 30)
        return comm

    def ncclAllReduce(self, *arguments: Any) -> None:
        pass

    def ncclBroadcast(
        self, source: Any, target: Any, count: int, kind: int, root: int, comm: Any, stream: Any
    ) -> None:
        from vllm.distributed.device_communicators.pynccl_wrapper import ncclDataTypeEnum

        (itemsize,) = (
            dtype.itemsize
            for dtype in (torch.uint8, torch.int64)
            if ncclDataTypeEnum.from_torch(dtype) == kind
        )
        if comm.rank == root:
            content = ctypes.string_at(source, count * itemsize)
            for rank, other in self._groups[comm.group].items():
                if rank != root:
                    other.queue.put(content)
        elif (content := comm.queue.get()) is not None:
            assert len(content) == count * itemsize, "both ends must divide the weights in the same way"
            ctypes.memmove(target, content, len(content))

    def ncclCommAbort(self, comm: Any) -> None:
        comm.queue.put(None)
        comm.aborted.set()


@contextmanager
def nccl() -> Iterator[list[Any]]:
    """Connect the threads of this process by vLLM's communicator; yields streams that were made current.

    The test ends all groups before this context ends, and the context waits for threads that leave them.
    """
    current: list[Any] = []
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)

    def use(chosen: Any) -> Any:
        current.append(chosen)
        return nullcontext()

    with ExitStack() as stack:
        for owner, name, value in (
            (pynccl, "NCCLLibrary", _Nccl),
            (pynccl, "current_stream", lambda: stream),
            (torch.cuda, "current_stream", lambda device=None: stream),
            (torch.cuda, "stream", use),
            (torch.accelerator, "device_index", lambda index: nullcontext()),
            # NCCL begins a broadcast at once, and here it begins when the message is there.
            (group, "_NOTE_S", 0.2),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield current
        for members in _Nccl._groups.values():
            assert all(comm.aborted.wait(30) for comm in members.values())
