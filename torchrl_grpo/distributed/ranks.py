"""The training ranks: processes that hold the model, or a shard of it, and take each step together.

Rank 0 runs the program: it grades, decides, publishes, logs and saves. The others hold their part of the
model, and an engine where ranks generate. They repeat each call that rank 0 makes with
:meth:`Ranks.call_all` or :meth:`Ranks.call_each`, and otherwise block in a receive.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor

from torchrl_grpo.config import Config
from torchrl_grpo.distributed import loopback
from torchrl_grpo.planning.cores import divide_cores
from torchrl_grpo.planning.plan import Plan
from torchrl_grpo.runtime import rank_env
from torchrl_grpo.runtime.interrupts import delay_interrupts

_T = TypeVar("_T")
_S = TypeVar("_S")
_R = TypeVar("_R")
_P = ParamSpec("_P")

# A long timeout: a round may take hours to generate, and a dead rank closes its connection anyway.
_PATIENCE = timedelta(days=30)


class Ranks:
    """This process's place among the ranks.

    Args:
        on_cpu: the ranks compute on the CPU.

    Attributes:
        rank: number of this rank, from 0.
        size: number of ranks.
        beside: group of all ranks in which threads exchange tensors in host memory beside training; None for
            a single rank.
    """

    def __init__(self, on_cpu: bool) -> None:
        self.rank, self.size = rank_env.rank(), rank_env.world_size()
        self._orders: dist.ProcessGroup | None = None
        self.beside: dist.ProcessGroup | None = None
        # Whether an exception ended a call that the other ranks may still be in, waiting for this one.
        self._broken = False
        if self.size > 1:
            # Transformers would leave all ranks but the first without weights, for Accelerate to fill in.
            os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
            with loopback.meeting_point() as options:
                PartialState(cpu=on_cpu, timeout=_PATIENCE, **options)
                # Calls are Python objects in the CPU's memory, whichever backend carries the tensors.
                self._orders = dist.new_group(backend="gloo", timeout=_PATIENCE)
                self.beside = dist.new_group(backend="gloo", timeout=_PATIENCE)

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that runs the program."""
        return self.rank == 0

    def broadcast_object(self, message: Any) -> None:
        """On rank 0: send an object to every other rank, where :meth:`recv` returns it."""
        if self.size > 1:
            dist.broadcast_object_list([message], src=0, group=self._orders)

    def recv(self) -> Any:
        """On the others: block until rank 0 broadcasts an object; None once it has exited."""
        box = [None]
        try:
            dist.broadcast_object_list(box, src=0, group=self._orders)
        except RuntimeError:
            return None
        return box[0]

    def call_all(
        self,
        function: Callable[Concatenate[_T, _P], _R],
        target: _T,
        *arguments: _P.args,
        **options: _P.kwargs,
    ) -> _R:
        """On rank 0: call a function with ``target`` while every other rank calls it with its own target.

        Args:
            function: function or method of a class, as ``Learner.step``; sent to the others by its name.
            target: first argument on this rank; the others use what they gave to :meth:`follow`.
            arguments: further arguments, sent to the others.
            options: further keyword arguments, sent to the others.

        Returns:
            The result on this rank.
        """
        if self.size == 1:
            return function(target, *arguments, **options)
        # Interrupted half way, this rank would leave the others in the middle of a collective call.
        with delay_interrupts(), self.mark_broken_on_error():
            self.broadcast_object((function, False, arguments, options))
            return function(target, *arguments, **options)

    def call_each(
        self,
        function: Callable[Concatenate[_T, _S, _P], _R],
        target: _T,
        shares: Sequence[_S],
        *arguments: _P.args,
        **options: _P.kwargs,
    ) -> _R:
        """Like :meth:`call_all`, with one of ``shares`` for each rank, in rank order, after its target.

        A rank receives no share but its own.
        """
        if self.size == 1:
            return function(target, shares[0], *arguments, **options)
        with delay_interrupts(), self.mark_broken_on_error():
            self.broadcast_object((function, True, arguments, options))
            return function(target, self._scatter(shares), *arguments, **options)

    def _scatter(self, shares: Sequence[Any] = ()) -> Any:
        """Return this rank's of the shares that rank 0 has."""
        box = [None]
        dist.scatter_object_list(box, list(shares), src=0, group=self._orders)
        return box[0]

    @property
    def are_apart(self) -> bool:
        """Whether an exception in a collective call has left the ranks out of step."""
        return self._broken

    @contextmanager
    def mark_broken_on_error(self) -> Iterator[None]:
        """Surround a collective call. After an exception in it, the ranks are out of step."""
        try:
            yield
        except BaseException:
            self._broken = True
            raise

    def follow(self, target: object) -> None:
        """On the others: run what rank 0 runs with ``call_all`` or ``call_each``, until it releases them."""
        while (order := self.recv()) is not None:
            function, has_share, arguments, options = order
            share = [self._scatter()] if has_share else []
            function(target, *share, *arguments, **options)

    def release(self) -> None:
        """On rank 0: let the others end :meth:`follow`.

        After an exception in a collective call they no longer receive. They end with this process.
        """
        if not self._broken:
            self.broadcast_object(None)

    def all_reduce_sum(self, values: dict[str, float], names: Sequence[str]) -> dict[str, float]:
        """Return the sum of each named value over all ranks; a value that a rank lacks counts as zero."""
        if self.size == 1:
            return {name: values.get(name, 0.0) for name in names}
        total = torch.tensor([values.get(name, 0.0) for name in names], dtype=torch.float64)
        dist.all_reduce(total, group=self._orders)
        return dict(zip(names, total.tolist(), strict=True))

    def all_reduce_max(self, value: int) -> int:
        """Return the largest value over all ranks."""
        if self.size == 1:
            return value
        box = torch.tensor([value])
        dist.all_reduce(box, dist.ReduceOp.MAX, group=self._orders)
        return int(box)

    def all_equal(self, value: int) -> bool:
        """Return whether all ranks have the same value."""
        return len(set(self.gather(value))) == 1

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Fill the tensors of all ranks (same shape, own device) with rank 0's, and return this rank's."""
        if self.size == 1:
            return tensor
        contiguous = tensor.contiguous()
        dist.broadcast(contiguous, src=0)
        return contiguous

    def gather(self, value: _T) -> list[_T]:
        """Return the objects of all ranks, in rank order, on every rank.

        Tensors in them must be on the CPU. Their shapes may differ between ranks.
        """
        if self.size == 1:
            return [value]
        boxes: list[Any] = [None] * self.size
        dist.all_gather_object(boxes, value, group=self._orders)
        return boxes

    def gather_to_main(self, value: _T) -> list[_T]:
        """Like :meth:`gather`, but the other ranks receive nothing and return an empty list."""
        if self.size == 1:
            return [value]
        boxes: list[Any] = [None] * self.size if self.is_main else []
        dist.gather_object(value, boxes if self.is_main else None, dst=0, group=self._orders)
        return boxes


@cache
def cores_to_divide(ranks: int) -> int:
    """Cores for training ranks and engines together, as this process found them.

    Cached, because dividing the cores changes what torch reports, and the next job of a sweep divides them
    again.

    Args:
        ranks: training ranks on this machine. Each counts with torch's default number of threads, which
            follows ``OMP_NUM_THREADS``. Launchers set that variable for several ranks.
    """
    return torch.get_num_threads() * ranks


def divide_threads(cfg: Config, plan: Plan) -> None:
    """Set this rank's number of threads: the configured one, or its share of the cores."""
    ranks = rank_env.local_world_size()
    # Set it even if this rank has all cores, because the job before it in a sweep may have lowered it.
    torch.set_num_threads(divide_cores(cfg, plan, cores_to_divide(ranks), ranks)[0])
