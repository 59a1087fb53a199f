"""Shards training across ranks with DeepSpeed.

ZeRO-2 shards gradients and optimizer state. ZeRO-3 also shards the parameters. DeepSpeed is an optional
package. Only this module imports it, and only on use. The project uses the forward pass, the backward pass
and the step of DeepSpeed's engine. Micro-batches, schedule and mixed precision remain the project's own.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_grpo.config.values import ZERO_STAGES
from torchrl_grpo.models.scoring.token_scorer import TokenScorer, output_head
from torchrl_grpo.models.shards import in_zero_shards

# Number of gradient elements exchanged at a time. DeepSpeed's default would keep a buffer of 2 GB.
_BUCKET = 50_000_000
_MOMENTS = ("exp_avg", "exp_avg_sq")


class ZeroNetwork(nn.Module):
    """Module that the loss calls in place of ``scorer``, usable once :class:`ZeroBackend` has set its engine.

    Args:
        scorer: scorer of the model.
        kind: kind of parallelism, ``deepspeed_zero2`` or ``deepspeed_zero3``.
        device: device of this rank.
    """

    engine: Any

    def __init__(self, scorer: TokenScorer, kind: str, device: torch.device) -> None:
        super().__init__()
        self.module = scorer
        self.stage = ZERO_STAGES[kind]
        self.device = device
        # Bypass nn.Module's registration: as a submodule, the engine would list the scorer twice.
        self.__dict__["engine"] = None

    def forward(self, *arguments: Any) -> Any:
        return self.engine(*arguments)


class ZeroBackend:
    """:class:`~torchrl_grpo.training.optimizer_backend.OptimizerBackend` that uses DeepSpeed's engine.

    Args:
        optimizer: torch optimizer of the whole parameters. DeepSpeed replaces them with this rank's part.
        max_grad_norm: largest norm of the gradients; larger ones are clipped to it.
        network: network that receives the engine. With ZeRO-3 its parameters become shards.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, max_grad_norm: float, network: ZeroNetwork) -> None:
        self._optimizer = optimizer
        self._network = network
        # Parameters in the optimizer's order, saved before DeepSpeed replaces them in the optimizer.
        self._parameters = [list(group["params"]) for group in optimizer.param_groups]
        self._engine = _make_engine(optimizer, max_grad_norm, network)
        network.__dict__["engine"] = self._engine
        weakref.finalize(self, _end, self._engine, network.module).atexit = False

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss)

    def set_zero_gradients(self, idle: Callable[[], Tensor]) -> None:
        # The engine takes a step only after a backward pass.
        self._engine.set_gradient_accumulation_boundary(True)
        self.backward(0.0 * idle())

    def step(self, apply: bool) -> float:
        if not apply:
            self._spoil()
        self._engine.step()
        return float(self._engine.get_global_grad_norm()) if self._engine.was_step_applied() else math.inf

    def zero_grad(self) -> None:
        """Do nothing: the engine drops the gradients in its step."""

    def _spoil(self) -> None:
        """Set a gradient to NaN, so that the engine skips the step and drops the gradients."""
        from deepspeed import utils

        first = next(parameter for group in self._parameters for parameter in group)
        if not in_zero_shards(first):
            utils.safe_set_full_grad(first, torch.full_like(first, math.nan))
        elif torch.distributed.get_rank() == 0:
            # Write on rank 0 only: the shards of the last ranks may contain padding, where a NaN would stay.
            utils.safe_set_local_grad(first, torch.full_like(first.ds_tensor, math.nan))

    def park(self) -> None:
        """Do nothing: the ranks divide the moments, and the configuration refuses to park them."""

    def optimizer_state(self, keep: bool = True) -> dict[str, Any]:
        from deepspeed.utils import safe_get_full_optimizer_state

        groups, start = [], 0
        for group, parameters in zip(self._optimizer.param_groups, self._parameters, strict=True):
            numbers = list(range(start, start + len(parameters)))
            groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": numbers})
            start += len(parameters)
        state: dict[int, dict[str, Tensor]] = {}
        if self._optimizer.state:
            self._link_moments()
            steps = next(iter(self._optimizer.state.values()))["step"]
            for index, parameter in enumerate(p for group in self._parameters for p in group):
                for name in _MOMENTS:
                    moment = safe_get_full_optimizer_state(parameter, name)
                    if keep:
                        state.setdefault(index, {"step": steps.detach().cpu().clone()})[name] = moment.cpu()
        return {"state": state, "param_groups": groups}

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        for group, saved in zip(self._optimizer.param_groups, state["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})
        if not state["state"]:
            return
        self._begin_state(state["state"][0]["step"])
        for index, parameter in enumerate(p for group in self._parameters for p in group):
            for name in _MOMENTS:
                _set_moment(parameter, name, state["state"][index][name])

    def _begin_state(self, steps: Tensor) -> None:
        """Create zero moments for this rank's parameters, as AdamW does in its first step."""
        zero = self._engine.optimizer
        stage2 = self._network.stage == 2
        for part in zero.single_partition_of_fp32_groups if stage2 else zero.fp32_partitioned_groups_flat:
            moments = {name: torch.zeros_like(part) for name in _MOMENTS}
            steps_there = steps.to(device=part.device, dtype=torch.float32).clone()
            self._optimizer.state[part] = {"step": steps_there, **moments}
        self._link_moments()

    def _link_moments(self) -> None:
        """With ZeRO-2, link each parameter to its moments.

        DeepSpeed links them in the first step, right after the update of the first group. The other groups
        have no moments at that point.
        """
        if self._network.stage == 3:
            return
        from deepspeed.utils import lazy_init_hp_params_optimizer_state

        zero = self._engine.optimizer
        for parameters, part in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
            lazy_init_hp_params_optimizer_state(parameters, part, self._optimizer.state)


def _set_moment(parameter: nn.Parameter, name: str, value: Tensor) -> None:
    from deepspeed import utils

    if not in_zero_shards(parameter):
        # This function copies this rank's part, from any device.
        utils.safe_set_full_optimizer_state(parameter, value, name)
        return
    # DeepSpeed's function for a whole moment fails if the size is not divisible by the number of ranks.
    held: Any = parameter
    size, rank = held.ds_tensor.numel(), torch.distributed.get_rank()
    part = torch.zeros(size, device=held.ds_tensor.device)
    own = value.flatten()[rank * size : (rank + 1) * size]
    part[: own.numel()] = own
    utils.safe_set_local_optimizer_state(parameter, part, name)


def engine_config(stage: int, max_grad_norm: float, largest_vector: int) -> dict[str, Any]:
    """Build DeepSpeed's configuration.

    Args:
        stage: stage of ZeRO, 2 or 3.
        max_grad_norm: largest norm of the gradients; larger ones are clipped to it.
        largest_vector: number of elements of the largest vector. With ZeRO-3, parameters up to this size stay
            whole between their uses in a step, because gathering a norm takes as long as gathering a matrix.
    """
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": _BUCKET}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = largest_vector
        # Release a matrix after each use, even if the next use is near. DeepSpeed's default would keep a
        # model of up to 10^9 parameters whole.
        zero["stage3_max_reuse_distance"] = 0
    return {
        # These two numbers are nominal, because micro-batches differ in size and number. Each step marks its
        # last micro-batch explicitly.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_grad_norm,
        "zero_optimization": zero,
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress DeepSpeed's log lines about the machine and about each of its settings."""
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _make_engine(optimizer: torch.optim.Optimizer, max_grad_norm: float, network: ZeroNetwork) -> Any:
    # Otherwise DeepSpeed would choose the accelerator by what it finds on the machine.
    os.environ["DS_ACCELERATOR"] = network.device.type
    with _quiet():
        return _initialize(optimizer, max_grad_norm, network)


def _initialize(optimizer: torch.optim.Optimizer, max_grad_norm: float, network: ZeroNetwork) -> Any:
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # Torch warns at every exchange about deprecated functions that DeepSpeed uses.
    warnings.filterwarnings("ignore", ".*(all_gather_into_tensor|reduce_scatter_tensor)", FutureWarning)
    # On a CPU, DeepSpeed would compile its own collectives. This takes minutes and needs a compiler, which
    # may be missing. Without them DeepSpeed uses gloo, as the other kinds of parallelism do.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    scorer = network.module
    vectors = [p.numel() for p in scorer.parameters() if p.ndim < 2]
    engine, *_ = deepspeed.initialize(
        args=SimpleNamespace(device_rank=network.device.index or 0),
        model=scorer,
        optimizer=optimizer,
        config=engine_config(network.stage, max_grad_norm, max(vectors, default=0)),
        dist_init_required=False,
    )
    if network.stage == 3:
        head = output_head(scorer.model)
        # The scorer multiplies with the head's weights by itself and never calls the head's forward.
        for parameter in (head.weight, head.bias):
            if parameter is not None:
                deepspeed.zero.register_external_parameter(scorer, parameter)
    return engine


def _end(engine: Any, scorer: TokenScorer) -> None:
    """Release the model from DeepSpeed's global state, because the next job of a sweep needs the memory."""
    from deepspeed.runtime.zero import parameter_offload

    engine.destroy()
    kept = [module for module in parameter_offload.FWD_MODULE_STACK if module is not scorer]
    parameter_offload.FWD_MODULE_STACK[:] = kept


@contextmanager
def gathered(parameter: Tensor, writable: bool = False) -> Iterator[Tensor]:
    """Gather a sharded parameter (ZeRO-3) inside a context that every rank must enter.

    Args:
        parameter: parameter to gather.
        writable: whether to keep changes of the parameter. The changes must be the same on every rank.
    """
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0 if writable else None):
        yield parameter.data
