"""Copies tensors from a GPU to host memory for a checkpoint that is written while the run goes on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from torchrl_grpo.runtime.hardware import available_gib
from torchrl_grpo.runtime.oom import ran_out_of_memory

# Copies lie in host memory during the next step if they take at most this share of what is free.
COPY_SHARE = 0.5


class HostCopies:
    """Copies what is on a GPU to pinned memory, which the GPU reads and writes without the processor.

    The memory is kept for the next checkpoint, because pinning it takes longer than the copy. Where it would
    take much of the host's memory, or cannot be pinned, copies lie in ordinary memory, and are not kept.

    Args:
        processes: number of processes of this machine that pin memory at the same time.
    """

    def __init__(self, processes: int = 1) -> None:
        self._share = COPY_SHARE / processes
        self._kept: list[Tensor] = []
        self._can_pin = True

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that is kept."""
        return sum(_pinned_bytes(copy) for copy in self._kept)

    def __call__(self, content: Any, device: torch.device) -> Any:
        """Return a nested structure with copies of all tensors on a GPU. Tied weights stay one tensor.

        The copies hold until the next call.

        Args:
            content: nested structure. Tensors in host memory stay as they are.
            device: GPU of this process.
        """
        on_gpu = {_key(tensor): tensor for tensor in tree_leaves(content) if _is_on_gpu(tensor)}
        if list(map(_layout, self._kept)) != list(map(_layout, on_gpu.values())):
            self.free()
            self._kept = self._pinned(list(on_gpu.values()))
        # In a stream of its own a copy neither waits for the work that is queued nor delays it.
        with torch.cuda.stream(torch.cuda.Stream(device)):
            copies = [
                kept.copy_(tensor.detach(), non_blocking=True)
                for kept, tensor in zip(self._kept, on_gpu.values(), strict=False)
            ] or [tensor.detach().cpu() for tensor in on_gpu.values()]
            torch.cuda.current_stream(device).record_event().synchronize()
        by_key = dict(zip(on_gpu, copies, strict=True))
        return tree_map_only(Tensor, lambda tensor: by_key.get(_key(tensor), tensor), content)

    def free(self) -> None:
        """Free the memory that is kept."""
        if self._kept:
            self._kept = []
            # Torch would keep it, and what is free would look like less.
            torch._C._host_emptyCache()

    def _pinned(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return pinned memory for tensors; nothing if the host has too little."""
        free = available_gib()
        is_large = free is not None and sum(map(_pinned_bytes, tensors)) > self._share * free * 2**30
        if is_large or not self._can_pin:
            return []
        try:
            return [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors]
        except RuntimeError as error:
            # Some systems allow little of it.
            if not ran_out_of_memory(error):
                raise
        # Here, where the error no longer holds those that were made.
        self._can_pin = False
        torch._C._host_emptyCache()
        return []


def _is_on_gpu(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_cuda


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype


def _key(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.device


def _pinned_bytes(tensor: Tensor) -> int:
    """Return the pinned memory that torch takes for a tensor: the next power of 2."""
    return int(1 << (max(1, tensor.nbytes) - 1).bit_length())
