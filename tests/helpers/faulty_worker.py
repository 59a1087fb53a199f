"""A rollout worker in a process of Ray's, and weights with planted faults on the way into it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from stale_parts import Fault, KeepsAPart
from torch import Tensor

from torchrl_grpo.inference.protocol import (
    Completion,
    Inference,
    Probe,
    ProbeResult,
    Sampling,
    SteppingEngine,
)
from torchrl_grpo.rollout.workers.ray_pool import RayPool
from torchrl_grpo.rollout.workers.ray_worker import RolloutActor, WorkerSpec
from torchrl_grpo.rollout.workers.types import LoadWeightsCommand, TrainerWeights

# Much, for a busy machine: a worker imports for six seconds of a core.
_PATIENCE_S = 400


@dataclass(frozen=True)
class Plant:
    """Command of these tests: take weights with a fault from now on."""

    fault: Fault | None


class FaultyActor(RolloutActor):
    """A worker whose engine can be told to take weights with a fault."""

    def make_engine(self, spec: WorkerSpec) -> SteppingEngine:
        made = super().make_engine(spec)
        made.__class__ = KeepsAPart
        return made

    def run(self, command: Any) -> Any:
        if not isinstance(command, Plant):
            return super().run(command)
        engine: Any = self.worker.engine
        engine.fault = command.fault
        return None


class OneWorker(Inference):
    """The only worker of ``pool``, called as the dispatcher calls it.

    Attributes:
        on_the_way: what happens to weights before they are sent.
    """

    on_the_way: Fault | None = None

    def __init__(self, pool: RayPool) -> None:
        self.pool = pool
        started: Future[Any] = Future()
        pool.start(0, started.set_result)
        assert started.result(_PATIENCE_S) is None

    def plant(self, fault: Fault | None) -> None:
        """Have the worker's engine take weights with ``fault``."""
        self._call(Plant(fault))

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int, probe: Probe) -> ProbeResult:
        fault = self.on_the_way
        sent = weights if fault is None else ((n, fault.applied(n, t)) for n, t in weights)
        result, _ = self._call(
            LoadWeightsCommand(self.pool.put_weights(sent), version, probe, return_interrupted=False)
        )
        assert isinstance(result, ProbeResult)
        return result

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        raise AssertionError("nobody asks for responses here")

    def close(self) -> None:
        self.pool.close()

    def _call(self, command: Any) -> Any:
        replied: Future[Any] = Future()
        self.pool.call(0, command, replied.set_result)
        if isinstance(command, LoadWeightsCommand) and isinstance(command.content, TrainerWeights):
            command.content.send_until(replied)
        answer = replied.result(_PATIENCE_S)
        if isinstance(answer, BaseException):
            raise answer
        return answer
