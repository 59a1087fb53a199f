"""An engine made of one engine per training rank. Each rank generates a part of the prompts.

Rounds and evaluations are divided evenly, so no rank waits while another generates. A response depends on
weights, prompt and seed (:class:`~torchrl_grpo.inference.protocol.Sampling`), not on the rank that generates
it, except for the rounding of a batch of another size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack

import torch
from torch import Tensor

from torchrl_grpo.config import Config
from torchrl_grpo.distributed.rank_engine import RankEngine
from torchrl_grpo.inference.build import EngineOptions
from torchrl_grpo.inference.checksums import Checksums
from torchrl_grpo.inference.protocol import Completion, Probe, ProbeResult, Request, SteppingEngine
from torchrl_grpo.training.learner import Learner

_R = TypeVar("_R")
_P = ParamSpec("_P")


class DataParallelEngine(SteppingEngine):
    """The engines of all ranks, as one engine on rank 0.

    A step generates whole responses, because ranks that wait for each other at every token are slow.

    Args:
        learner: learner of rank 0, with its engine: see :meth:`Learner.build_rank_engine`.
    """

    def __init__(self, learner: Learner) -> None:
        assert learner.engine is not None
        self._learner, self._rank_engine = learner, learner.engine
        self._waiting: list[Request] = []

    def submit(self, requests: Sequence[Request]) -> None:
        self._waiting += requests

    def step(self) -> list[tuple[Hashable, Completion]]:
        """See :meth:`SteppingEngine.step`; all responses end."""
        requests, self._waiting = self._waiting, []
        return list(self._call_all(RankEngine.answer, requests).items())

    def abort_all(self) -> dict[Hashable, Completion]:
        """See :meth:`SteppingEngine.abort_all`. None is running between two steps."""
        requests, self._waiting = self._waiting, []
        return {request.key: Completion([], [], "aborted") for request in requests}

    def next_tokens(self, probe: Probe) -> ProbeResult:
        """See :meth:`Engine.next_tokens`; each rank's engine runs the probe."""
        return self._call_all(RankEngine.next_tokens, probe)

    def locate_weights(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._call_all(RankEngine.locate_weights, shapes)

    def start_update(self) -> None:
        self._call_all(RankEngine.start_update)

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See :meth:`Engine.update`. Rank 0 sends one tensor at a time to all ranks."""
        for name, tensor in weights:
            self._rank_engine.outgoing = tensor.to(self._rank_engine.device)
            self._call_all(RankEngine.update, name, tensor.shape, tensor.dtype)
        self._rank_engine.outgoing = None

    def finish_update(self) -> None:
        self._call_all(RankEngine.finish_update)

    def checksums(self) -> tuple[Checksums, ...]:
        """See :meth:`Engine.checksums`; one entry for each rank."""
        return self._call_all(RankEngine.checksums)

    def reset_cache(self) -> None:
        self._call_all(RankEngine.reset_cache)

    def sleep(self) -> None:
        self._call_all(RankEngine.sleep)

    def wake(self) -> None:
        self._call_all(RankEngine.wake)

    def close(self) -> None:
        """See :meth:`Inference.close`. The other ranks free their engines when they are released."""
        self._rank_engine.engine.close()

    def _call_all(
        self,
        method: Callable[Concatenate[RankEngine, _P], _R],
        *arguments: _P.args,
        **options: _P.kwargs,
    ) -> _R:
        return self._learner.ranks.call_all(_call_rank_engine, self._learner, method, arguments, options)


def _call_rank_engine(
    learner: Learner, method: Callable[..., _R], arguments: tuple[Any, ...], options: dict[str, Any]
) -> _R:
    return method(learner.engine, *arguments, **options)


def build_data_parallel_engine(
    learner: Learner,
    cfg: Config,
    source: str,
    device: torch.device,
    **options: Unpack[EngineOptions],
) -> SteppingEngine:
    """Call :func:`~torchrl_grpo.inference.build.build_engine` on every rank, each on its own device.

    Args:
        learner: learner of rank 0.
        cfg: configuration; unused, because each rank has it already.
        source: folder or hub name of the weights.
        device: device of rank 0; unused, because each rank has its own.
        options: the other arguments.

    Raises:
        ModelError: the model cannot be loaded.
    """
    learner.ranks.call_all(Learner.build_rank_engine, learner, source, options)
    return DataParallelEngine(learner)
