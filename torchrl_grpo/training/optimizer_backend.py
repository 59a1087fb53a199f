"""Performs the backward passes and the weight update of an optimizer step, with torch or DeepSpeed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchrl_grpo.distributed.deepspeed import ZeroBackend, ZeroNetwork
from torchrl_grpo.distributed.parallelism import full_tensor, shard_like
from torchrl_grpo.distributed.parking import MomentParking


class OptimizerBackend(Protocol):
    """Accumulates gradients over backward passes, and updates the weights. Every rank calls each method."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of ``loss``."""

    def set_zero_gradients(self, idle: Callable[[], Tensor]) -> None:
        """Set all gradients to zero. The next step still decays moments and weights.

        Args:
            idle: function that computes any loss, for backends that need a backward pass.
        """

    def step(self, apply: bool) -> float:
        """Clip the gradients and update the weights, unless the norm of the gradients is not finite.

        Args:
            apply: whether to update the weights; False skips the update.

        Returns:
            The norm before clipping. It is not finite if a gradient is not.
        """

    def zero_grad(self) -> None:
        """Discard the gradients."""

    def optimizer_state(self, keep: bool = True) -> dict[str, Any]:
        """Return the optimizer's state in torch's format for an unsharded model. FSDP2's shards stay shards.

        Its tensors may be the optimizer's own, which the next update changes.

        Args:
            keep: whether to return moments that are not shards of FSDP2. They are twice the size of the
                weights. A rank with False only helps to gather those of DeepSpeed, one at a time.
        """

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Restore the result of :meth:`optimizer_state`. Each rank copies its part of each moment.

        Args:
            state: state with all moments, which may be mapped from a file and read on access.
        """

    def park(self) -> None:
        """Free the moments' memory on the device until the next update, as far as that is supported."""


class TorchBackend:
    """:class:`OptimizerBackend` of a model that is unsharded, or sharded with FSDP2.

    Args:
        optimizer: optimizer of the parameters.
        scaler: scaler of the loss.
        max_grad_norm: norm to which gradients are clipped.
        loads_parked: whether a loaded state begins in host memory.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        max_grad_norm: float,
        loads_parked: bool = False,
    ) -> None:
        self._parking = MomentParking(optimizer)
        self._loads_parked = loads_parked
        self._optimizer = optimizer
        self._scaler = scaler
        self._max_grad_norm = max_grad_norm
        # In the optimizer's order.
        self._parameters: list[nn.Parameter] = [p for g in optimizer.param_groups for p in g["params"]]

    def backward(self, loss: Tensor) -> None:
        self._scaler.scale(loss).backward()

    def set_zero_gradients(self, idle: Callable[[], Tensor]) -> None:
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)
        # The scaler refuses to unscale gradients before it has scaled a tensor.
        self._scaler.scale(torch.zeros((), device=self._parameters[0].device))

    def step(self, apply: bool) -> float:
        self._scaler.unscale_(self._optimizer)
        norm = float(full_tensor(nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)))
        if apply and math.isfinite(norm):
            self._parking.fetch()
            self._scaler.step(self._optimizer)
        return norm

    def zero_grad(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def optimizer_state(self, keep: bool = True) -> dict[str, Any]:
        state = self._optimizer.state_dict()
        moments: dict[int, dict[str, Any]] = {}
        # Not from the result of state_dict: bitsandbytes has another form there.
        for index, parameter in enumerate(self._parameters):
            for name, value in self._optimizer.state.get(parameter, {}).items():
                if keep or isinstance(value, DTensor):
                    # The number of updates may be a plain number.
                    own = self._parking.read(parameter, name, value) if isinstance(value, Tensor) else value
                    moments.setdefault(index, {})[name] = own
        return {**state, "state": moments}

    def park(self) -> None:
        self._parking.park()

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        # Without the moments: bitsandbytes would hold them twice. One parameter at a time, because an engine
        # may have taken the memory for all of them.
        self._optimizer.load_state_dict({**state, "state": {}})
        for index, entry in state["state"].items():
            parameter = self._parameters[index]
            self._optimizer.state[parameter] = _own_part(entry, parameter)
            if self._loads_parked:
                self._parking.park_parameter(parameter)


def _own_part(entry: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Copy this rank's part of the saved state of a parameter."""
    return {
        name: shard_like(value, parameter) if isinstance(value, Tensor) else value
        for name, value in entry.items()
    }


def make_backend(
    network: nn.Module | None,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    max_grad_norm: float,
    loads_parked: bool = False,
) -> OptimizerBackend:
    """Return the backend for the result of :func:`~torchrl_grpo.distributed.parallelism.distribute`."""
    if isinstance(network, ZeroNetwork):
        return ZeroBackend(optimizer, max_grad_norm, network)
    return TorchBackend(optimizer, scaler, max_grad_norm, loads_parked)
