"""Memory of one GPU that other processes of the machine can open, and what says which GPU it is.

:class:`SharedMemory` is the protocol, so that tests can put memory of the host in its place.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from torchrl_grpo.runtime.hardware import ALLOCATOR_VARIABLES

_OFF = "expandable_segments:False"


class SharedMemory(Protocol):
    """Memory of a device, as its owner and as a process that opens it see it."""

    def gpu_name(self) -> str:
        """Return a text that names the GPU on every machine and in every process."""

    def reaches(self, name: str) -> bool:
        """Return whether the GPU with this name can read the memory of this one."""

    def allocate(self, size: int) -> Tensor:
        """Return ``size`` bytes that :meth:`export` takes."""

    def export(self, memory: Tensor) -> list[Any]:
        """Return a handle as JSON, with which one other process can open the memory once."""

    def open(self, handle: list[Any]) -> Tensor:
        """Return the bytes of another process."""

    def synchronize(self) -> None:
        """Block until the device has done what it was told to do."""


class CudaMemory:
    """Memory of a GPU, by CUDA's handles.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def gpu_name(self) -> str:
        """See :meth:`SharedMemory.gpu_name`."""
        return gpu_name(self._device)

    def reaches(self, name: str) -> bool:
        """See :meth:`SharedMemory.reaches`. A GPU that this process does not see is out of reach."""
        for index in range(torch.cuda.device_count()):
            if gpu_name(torch.device("cuda", index)) == name:
                return index == self._device.index or torch.cuda.can_device_access_peer(
                    index, self._device.index
                )
        return False

    def allocate(self, size: int) -> Tensor:
        """See :meth:`SharedMemory.allocate`."""
        with _without_expandable_segments():
            return torch.empty(size, dtype=torch.uint8, device=self._device)

    def export(self, memory: Tensor) -> list[Any]:
        """See :meth:`SharedMemory.export`. torch counts the uses of each handle."""
        # The first entry is the device's number here, which means nothing elsewhere.
        _, *handle = memory.untyped_storage()._share_cuda_()
        return [
            base64.b64encode(part).decode() if isinstance(part, bytes) else part
            for part in [*handle, memory.storage_offset(), memory.numel()]
        ]

    def open(self, handle: list[Any]) -> Tensor:
        """See :meth:`SharedMemory.open`."""
        memory, size, offset, counter, counter_offset, event, synchronize, first, count = handle
        with torch.cuda.device(self._device):
            storage = torch.UntypedStorage._new_shared_cuda(
                self._device.index,
                base64.b64decode(memory),
                size,
                offset,
                base64.b64decode(counter),
                counter_offset,
                base64.b64decode(event),
                synchronize,
            )
        opened = torch.empty(0, dtype=torch.uint8, device=self._device)
        opened.set_(storage, first, (count,), (1,))
        return opened

    def synchronize(self) -> None:
        """See :meth:`SharedMemory.synchronize`."""
        torch.cuda.synchronize(self._device)


def gpu_name(device: torch.device) -> str:
    """Return the UUID of a GPU; an empty text for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


@contextmanager
def _without_expandable_segments() -> Iterator[None]:
    """Let torch allocate in segments of fixed sizes.

    A handle of an expandable segment is a file descriptor, which another process takes out of this one. That
    needs the system call ``pidfd_getfd``, which containers often forbid, and it is slow.
    """
    told = next((os.environ[name] for name in ALLOCATOR_VARIABLES if os.environ.get(name)), "")
    if "expandable_segments:True" not in told:
        yield
        return
    torch._C._accelerator_setAllocatorSettings(f"{told},{_OFF}")
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(told)
