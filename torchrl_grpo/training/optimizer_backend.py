"""The update of an optimizer step, from the backward pass on: by torch, or by DeepSpeed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchrl_grpo.distributed.deepspeed import ZeroNetwork, ZeroUpdate
from torchrl_grpo.distributed.parallelism import full_tensor, shard_like


class Update(Protocol):
    """Backward passes that add up, and the update by their sum; every rank calls each method."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of ``loss``."""

    def without_gradient(self, idle: Callable[[], Tensor]) -> None:
        """Have gradients of zero: an update by these is one, moments decay and so do weights.

        Args:
            idle: computes some loss, for who needs one.
        """

    def step(self, allowed: bool) -> float:
        """Clip the gradients and update by them, unless their norm is not finite or it is not ``allowed``.

        Returns:
            The norm before clipping; of gradients that are not finite, not a finite number.
        """

    def drop_gradients(self) -> None:
        """Forget the gradients."""

    def optimizer_state(self, keep: bool = True) -> dict[str, Any]:
        """The optimizer's state as torch's of a whole model has it, on the CPU.

        Args:
            keep: hold the moments; whoever does not only helps to gather them, one at a time, and returns
                none: they are twice the size of the weights.
        """

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Take what :meth:`optimizer_state` returned, of each moment a copy of this rank's part.

        Args:
            state: with all moments, which may lie in a file that is read where it is touched.
        """


class TorchUpdate:
    """:class:`Update` of a model that is whole on each rank, or in shards of FSDP2.

    Args:
        optimizer: optimizer of the parameters.
        scaler: scaler of the loss.
        max_grad_norm: norm to which gradients are clipped.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, max_grad_norm: float
    ) -> None:
        self._optimizer = optimizer
        self._scaler = scaler
        self._max_grad_norm = max_grad_norm
        # As the optimizer numbers them.
        self._parameters: list[nn.Parameter] = [p for g in optimizer.param_groups for p in g["params"]]

    def backward(self, loss: Tensor) -> None:
        self._scaler.scale(loss).backward()

    def without_gradient(self, idle: Callable[[], Tensor]) -> None:
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)
        # The scaler cannot undo a scale that it was never asked for.
        self._scaler.scale(torch.zeros((), device=self._parameters[0].device))

    def step(self, allowed: bool) -> float:
        self._scaler.unscale_(self._optimizer)
        norm = float(full_tensor(nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)))
        if allowed and math.isfinite(norm):
            self._scaler.step(self._optimizer)
        return norm

    def drop_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def optimizer_state(self, keep: bool = True) -> dict[str, Any]:
        found = self._optimizer.state_dict()
        moments: dict[int, dict[str, Tensor]] = {}
        for index, entry in found["state"].items():
            for name, value in entry.items():
                if keep:
                    moments.setdefault(index, {})[name] = full_tensor(value).cpu()
                elif isinstance(value, DTensor):
                    # The rank that keeps it cannot gather it alone.
                    full_tensor(value)
        return {**found, "state": moments}

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        moments = {
            index: {name: shard_like(value, self._parameters[index]) for name, value in entry.items()}
            for index, entry in state["state"].items()
        }
        self._optimizer.load_state_dict({**state, "state": moments})


def make_update(
    network: nn.Module | None,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    max_grad_norm: float,
) -> Update:
    """The update for ``network``, which :func:`~torchrl_grpo.distributed.parallelism.distribute` made."""
    if isinstance(network, ZeroNetwork):
        return ZeroUpdate(optimizer, max_grad_norm, network)
    return TorchUpdate(optimizer, scaler, max_grad_norm)
