"""One engine made of as many as there are training ranks: each rank generates its share with one of its own.

Rounds and evaluations are divided alike, so no rank waits while another generates. What a response is depends
on weights, prompt and seed (:class:`~torchrl_grpo.inference.protocol.Sampling`) and so not on who generates
it, but for the rounding of a batch of another size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from torchrl_grpo.config import Config
from torchrl_grpo.distributed.engine_share import Answers, EngineShare
from torchrl_grpo.inference.checksums import Checksums
from torchrl_grpo.inference.protocol import Engine, Probe, ProbeResult, Sampling
from torchrl_grpo.training.learner import Learner

_R = TypeVar("_R")
_P = ParamSpec("_P")


class SharedEngine(Engine):
    """All ranks' engines, seen from rank 0 as one.

    Args:
        learner: rank 0's, which has its share: see :meth:`Learner.share_engine`.
    """

    def __init__(self, learner: Learner) -> None:
        assert learner.engine is not None
        self._learner, self._share = learner, learner.engine

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Answers:
        """See :meth:`Inference.generate`."""
        return self._call_all(EngineShare.generate, prompts, sampling)

    def next_tokens(self, probe: Probe) -> ProbeResult:
        """See :meth:`Engine.next_tokens`; each rank's engine runs the probe."""
        return self._call_all(EngineShare.next_tokens, probe)

    def locate_weights(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """See :meth:`Engine.locate_weights`."""
        self._call_all(EngineShare.locate_weights, shapes)

    def start_update(self) -> None:
        """See :meth:`Engine.start_update`."""
        self._call_all(EngineShare.start_update)

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See :meth:`Engine.update`; a tensor at a time goes from rank 0 to all."""
        for name, tensor in weights:
            self._share.outgoing = tensor.to(self._share.device)
            self._call_all(EngineShare.update, name, tensor.shape, tensor.dtype)
        self._share.outgoing = None

    def finish_update(self) -> None:
        """See :meth:`Engine.finish_update`."""
        self._call_all(EngineShare.finish_update)

    def checksums(self) -> tuple[Checksums, ...]:
        """See :meth:`Engine.checksums`; one entry for each rank."""
        return self._call_all(EngineShare.checksums)

    def reset_cache(self) -> None:
        """See :meth:`Engine.reset_cache`."""
        self._call_all(EngineShare.reset_cache)

    def sleep(self) -> None:
        """See :meth:`Engine.sleep`."""
        self._call_all(EngineShare.sleep)

    def wake(self) -> None:
        """See :meth:`Engine.wake`."""
        self._call_all(EngineShare.wake)

    def close(self) -> None:
        """See :meth:`Inference.close`. The other ranks free theirs when they are released."""
        self._share.engine.close()

    def _call_all(
        self,
        method: Callable[Concatenate[EngineShare, _P], _R],
        *arguments: _P.args,
        **options: _P.kwargs,
    ) -> _R:
        return self._learner.ranks.call_all(_call_share, self._learner, method, arguments, options)


def _call_share(
    learner: Learner, method: Callable[..., _R], arguments: tuple[Any, ...], options: dict[str, Any]
) -> _R:
    return method(learner.engine, *arguments, **options)


def shared_engine(
    learner: Learner,
    cfg: Config,
    source: str,
    device: torch.device,
    *,
    eos_token_ids: Sequence[int],
    pad_token_id: int,
    max_num_seqs: int,
    sleeps: bool,
    gpu_memory_utilization: float,
) -> Engine:
    """:func:`~torchrl_grpo.inference.build.build_engine` on every rank, each on its own device.

    Args:
        learner: rank 0's learner.
        cfg: configuration, which each rank has already.
        source: folder or hub name of the weights.
        device: rank 0's device.
        eos_token_ids: see :func:`build_engine`, as for the rest.
        pad_token_id: padding id.
        max_num_seqs: most responses decoded at a time.
        sleeps: whether the engine will be told to sleep.
        gpu_memory_utilization: share of the GPU's memory that vLLM takes.

    Raises:
        ModelError: the model cannot be loaded.
    """
    learner.ranks.call_all(
        Learner.share_engine,
        learner,
        source,
        eos_token_ids=eos_token_ids,
        pad_token_id=pad_token_id,
        max_num_seqs=max_num_seqs,
        sleeps=sleeps,
        gpu_memory_utilization=gpu_memory_utilization,
    )
    return SharedEngine(learner)
