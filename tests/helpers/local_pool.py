"""Rollout workers as threads of the test's process, with faults on request."""

from __future__ import annotations

import copy
import math
import queue
import random
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from torchrl_grpo.config import Config
from torchrl_grpo.envs.episodes.build import with_episodes
from torchrl_grpo.envs.group_text import GroupTextEnv
from torchrl_grpo.inference.build import build_engine
from torchrl_grpo.inference.protocol import SteppingEngine
from torchrl_grpo.rollout import build
from torchrl_grpo.rollout.collector import Collector
from torchrl_grpo.rollout.groups import Group
from torchrl_grpo.rollout.workers.reference_actors import ReferenceScorer, ReferenceSpec
from torchrl_grpo.rollout.workers.types import Command, GenerateForEval, GenerateGroups, LoadWeightsCommand
from torchrl_grpo.rollout.workers.worker import RolloutWorker

_BUILDING = threading.Lock()
# Names of commands, as a fault is told them.
_NAMES = {GenerateGroups: "work", LoadWeightsCommand: "load", GenerateForEval: "generate"}

Fault = Callable[[int, str, int], None]


class LocalPool:
    """A thread for each worker.

    Args:
        make_engine: builds a worker's engine.
        cfg: the run's configuration.
        fault: called with worker, method and number of the call, before it; may raise, sleep or block.
        delay: seconds each token takes at most.
    """

    overwrites = False

    def __init__(
        self,
        make_engine: Callable[[], SteppingEngine],
        cfg: Config,
        fault: Fault = lambda number, method, count: None,
        delay: float = 0.0,
    ) -> None:
        self._make_engine = make_engine
        self._options = cfg.inference_model
        self._fault = fault
        self._delay = delay
        self._inboxes: dict[int, queue.SimpleQueue[Any]] = {}
        self._threads: list[threading.Thread] = []
        self.calls = 0
        self.killed = 0
        self.closed = False

    def start(self, number: int, done: Callable[[Any], None]) -> None:
        self._inboxes[number] = queue.SimpleQueue()
        thread = threading.Thread(target=self._serve, args=(number, self._inboxes[number], done), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self, number: int, inbox: queue.SimpleQueue[Any], done: Callable[[Any], None]) -> None:
        try:
            # transformers builds models under settings of the whole process: one at a time.
            with _BUILDING:
                self._fault(number, "start", 0)
                engine = self._make_engine()
        except Exception as error:  # noqa: BLE001  it is reported
            done(error)
            return
        chance = random.Random(number)
        if self._delay:
            step = engine.step

            def slow() -> Any:
                time.sleep(chance.random() * self._delay)
                return step()

            engine.step = slow  # type: ignore[method-assign]
        worker = RolloutWorker(
            engine, self._options.max_new_tokens, self._options.temperature, time.perf_counter
        )
        done(None)
        while (job := inbox.get()) is not None:
            command, report = job
            self.calls += 1
            try:
                self._fault(number, _NAMES[type(command)], self.calls)
                # As over a wire: neither side may see what the other does to its copy.
                report(copy.deepcopy(worker.run(copy.deepcopy(command))))
            except Exception as error:  # noqa: BLE001  it is reported
                report(error)

    def call(self, number: int, command: Command, done: Callable[[Any], None]) -> None:
        self._inboxes[number].put((command, done))

    def put_weights(self, weights: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        return [(name, tensor.clone()) for name, tensor in weights]

    def kill(self, number: int) -> None:
        self.killed += 1
        self._inboxes[number].put(None)

    def close(self) -> None:
        self.closed = True
        for inbox in self._inboxes.values():
            inbox.put(None)


class LocalReference:
    """What stands in for ``ReferenceActors``: a thread."""

    def __init__(self, cfg: Config, source: build.EngineSource, tokenizer: PreTrainedTokenizerBase) -> None:
        threads = torch.get_num_threads()
        form = source.autocast_dtype, source.shares_prefix
        spec = ReferenceSpec(
            cfg, source.frozen or source.model, tokenizer.pad_token_id, threads, False, *form
        )
        self.scorer = ReferenceScorer(spec)
        self._thread = ThreadPoolExecutor(1)

    def log_probs(self, group: Group) -> Future[list[list[float]]]:
        responses = [response.token_ids for response in group.responses]
        files = None if group.pictures is None else group.pictures.files
        prompt = group.teacher_prompt or group.prompt
        return self._thread.submit(self.scorer.log_probs, prompt, responses, files)

    def deadline(self) -> float:
        return math.inf

    def restart_timed_out(self) -> None:
        """A thread cannot be ended."""


def collect_locally(
    pools: list[LocalPool], engine_type: Any = None, **options: Any
) -> build.CollectorFactory:
    """What stands in for ``build.collector_with_ray_workers``; every pool made is appended to ``pools``."""

    def collect(
        cfg: Config, source: build.EngineSource, env: GroupTextEnv, tokenizer: PreTrainedTokenizerBase
    ) -> Collector:
        def engine() -> SteppingEngine:
            made = build_engine(
                cfg, source.model, torch.device("cpu"), source.eos_token_ids, tokenizer.pad_token_id, 64
            )
            if engine_type is not None:
                made.__class__ = engine_type
            return with_episodes(cfg, made, 64)

        pools.append(LocalPool(engine, cfg, **options))
        reference = LocalReference(cfg, source, tokenizer) if source.plan.reference_actors else None
        return build.collector_with_workers(cfg, source, env, tokenizer, pools[-1], reference)

    return collect
