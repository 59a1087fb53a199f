"""Memory of the host behind the protocol of a GPU's: handles open it in any process of the machine."""

from __future__ import annotations

import base64
from typing import Any

import torch
from torch import Tensor


class HostMemory:
    """Stands for the GPU called ``name``, which the GPUs called ``readers`` can read."""

    def __init__(self, name: str = "GPU-1", readers: tuple[str, ...] = ()) -> None:
        self.name, self.readers = name, readers
        self.opened = 0
        self.waits = 0

    def gpu_name(self) -> str:
        return self.name

    def reaches(self, name: str) -> bool:
        return name in self.readers

    def allocate(self, size: int) -> Tensor:
        made = torch.empty(size, dtype=torch.uint8)
        made.share_memory_()
        return made

    def export(self, memory: Tensor) -> list[Any]:
        manager, handle, size = memory.untyped_storage()._share_filename_cpu_()
        return [base64.b64encode(part).decode() for part in (manager, handle)] + [size]

    def open(self, handle: list[Any]) -> Tensor:
        self.opened += 1
        manager, name = (base64.b64decode(part) for part in handle[:2])
        storage = torch.UntypedStorage._new_shared_filename_cpu(manager, name, handle[2])
        opened = torch.empty(0, dtype=torch.uint8)
        opened.set_(storage, 0, (handle[2],), (1,))
        return opened

    def synchronize(self) -> None:
        self.waits += 1
