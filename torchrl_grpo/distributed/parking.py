"""Keeps the optimizer's moments in host memory while they are not needed.

The moments are twice the size of the weights, and only the update reads them. While an engine generates on
the same GPU, they may wait in pinned host memory. With FSDP2, each rank parks its own shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchrl_grpo.distributed.shard_transfer import Shard, own_part

# Entry of the optimizer's state that is not a moment: the number of updates. It is a single number.
_STEP = "step"


class MomentParking:
    """Moves the moments of an optimizer to host memory and back. The tensors stay the same objects.

    Args:
        optimizer: optimizer whose state has tensors by name for each parameter.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        # Kept between two visits, because pinning memory takes long.
        self._host: dict[tuple[int, str], Tensor] = {}

    def park(self) -> None:
        """Copy all moments to host memory, and free their memory on the device."""
        self._free([moment for parameter in self._optimizer.state for moment in self._start(parameter)])

    def park_parameter(self, parameter: Tensor) -> None:
        """Do the same for the moments of one parameter."""
        self._free(list(self._start(parameter)))

    @staticmethod
    def _free(moments: list[Tensor]) -> None:
        """Free the memory of moments whose copies are queued, once these are done."""
        for device in {moment.device for moment in moments if moment.is_cuda}:
            torch.cuda.synchronize(device)
        for moment in moments:
            moment.untyped_storage().resize_(0)

    def fetch(self) -> None:
        """Give all moments memory on their devices again, with their values."""
        for parameter in self._optimizer.state:
            for name, moment in self._moments(parameter):
                if is_parked(moment):
                    _fill(moment, self._host[id(parameter), name])

    def read(self, parameter: Tensor, name: str, value: Tensor) -> Tensor | Shard:
        """Return an entry of the state, or this rank's shard of it. It holds until the next update."""
        parked = name != _STEP and is_parked(_local(value))
        return own_part(value, self._host[id(parameter), name] if parked else None)

    def _start(self, parameter: Tensor) -> Iterator[Tensor]:
        """Queue copies of the moments of a parameter that are on the device, and yield these moments."""
        for name, moment in self._moments(parameter):
            if moment.numel() == 0 or is_parked(moment):
                continue
            key = (id(parameter), name)
            if key not in self._host:
                self._host[key] = torch.empty(moment.shape, dtype=moment.dtype, pin_memory=moment.is_cuda)
            self._host[key].copy_(moment, non_blocking=True)
            yield moment

    def _moments(self, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
        state: dict[str, Any] = self._optimizer.state.get(parameter, {})
        for name, value in state.items():
            if name != _STEP:
                yield name, _local(value)


def is_parked(moment: Tensor) -> bool:
    """Return whether a moment is in host memory: it has elements, and its own storage has none."""
    return moment.numel() > 0 and moment.untyped_storage().nbytes() == 0


def _fill(moment: Tensor, host: Tensor) -> None:
    moment.untyped_storage().resize_(moment.numel() * moment.element_size())
    moment.copy_(host, non_blocking=True)


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value
