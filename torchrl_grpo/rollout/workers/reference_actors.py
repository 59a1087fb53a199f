"""Runs the frozen model of ``grpo-async.py``, reference or teacher, in processes that score while it trains.

Each process is a Ray actor with a copy of the model on its own device. The model is frozen, so an actor has
no state to lose. If an actor dies, Ray restarts it and resends its requests.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError, RayError
from tensordict import lazy_stack

from torchrl_grpo.batch.micro_batches import TokenBudget
from torchrl_grpo.batch.schema import pictures_entry, tokens_of
from torchrl_grpo.config import Config
from torchrl_grpo.config.derived import frozen_model, teacher_of, token_budget
from torchrl_grpo.errors import WorkersLost
from torchrl_grpo.planning.cores import worker_env
from torchrl_grpo.rollout.groups import Group, ReferenceLogProbs
from torchrl_grpo.rollout.log_prob_transform import CANDIDATE_LOG_PROBS, CANDIDATES, LogProbScorer
from torchrl_grpo.rollout.workers.ray_pool import RayPool, call_when_done


@dataclass(frozen=True)
class ReferenceSpec:
    """Specification of an actor.

    Attributes:
        cfg: configuration of the run.
        source: folder or hub name of the model; on a cluster, one that every node sees.
        pad_token_id: padding id.
        threads: number of CPU threads.
        on_gpu: whether the actor has a GPU.
        autocast_dtype: number format of the trainer.
        shares_prefix: whether the model computes a prompt once per group.
        vocabulary: number of tokens of the policy; None for all that the model has.
    """

    cfg: Config
    source: str
    pad_token_id: int
    threads: int
    on_gpu: bool
    autocast_dtype: torch.dtype | None
    shares_prefix: bool
    vocabulary: int | None = None


class ReferenceScorer:
    """Computes reference log-probabilities for one group at a time, with the model in this process."""

    def __init__(self, spec: ReferenceSpec) -> None:
        from torchrl_grpo.models.reference import load_reference
        from torchrl_grpo.runtime.hardware import use_expandable_segments
        from torchrl_grpo.runtime.malloc import keep_freed_memory

        torch.set_num_threads(spec.threads)
        if spec.on_gpu:
            use_expandable_segments()
        else:
            keep_freed_memory()
        device = torch.device("cuda:0" if spec.on_gpu else "cpu")
        scorer = load_reference(spec.cfg, spec.source, device, spec.autocast_dtype, spec.shares_prefix)
        # A budget halves itself when memory runs out, and gives notice. Drop the notice: nobody reads this
        # process's output, and only its speed changes.
        budget = TokenBudget(token_budget(spec.cfg), scorer.shares_prefix, notify=lambda text: None)
        self._pad_token_id = spec.pad_token_id
        self._top_k = spec.cfg.policy.distill_top_k
        self._scorer = LogProbScorer(
            scorer, "reference", budget, top_k=self._top_k, vocabulary=spec.vocabulary
        )

    def log_probs(
        self,
        prompt: Sequence[int],
        responses: Sequence[Sequence[int]],
        files: Sequence[bytes] | None = None,
    ) -> ReferenceLogProbs:
        """Return log-probabilities of each token of G responses, at the sampling temperature.

        The list of a response has T log-probabilities. With ``policy.distill_top_k=K``, K x T candidate token
        ids follow, and then their K x T log-probabilities.

        Args:
            prompt: token ids of the prompt.
            responses: token ids of the responses.
            files: encoded pictures of the prompt; None for a model of text.
        """
        group = tokens_of(prompt, responses, self._pad_token_id)
        if files is not None:
            group["pictures"] = pictures_entry(files)
        scored = self._scorer.inv(lazy_stack([group]))
        keys = [("log_probs", "reference"), *([CANDIDATES, CANDIDATE_LOG_PROBS] if self._top_k else [])]
        return [
            [number for key in keys for number in scored[key][0, g, ..., : len(response)].flatten().tolist()]
            for g, response in enumerate(responses)
        ]


class ReferenceActors:
    """Actors with the reference model. The least busy actor gets the next group.

    Args:
        pool: pool that reserved a place for each actor, after those of its workers. Closing the pool ends the
            actors.
        spec: specification of every actor.
        count: number of actors.
        limit_s: time limit for an answer in seconds, a start included.

    Raises:
        WorkersLost: an actor could not be started.
    """

    def __init__(self, pool: RayPool, spec: ReferenceSpec, count: int, limit_s: float) -> None:
        restarts = spec.cfg.collector.max_restarts
        self._actors = [
            ray.remote(ReferenceScorer)
            .options(
                num_cpus=1,
                num_gpus=1 if spec.on_gpu else 0,
                scheduling_strategy=pool.extra_actor_placement(number),
                max_restarts=restarts,
                max_task_retries=restarts,
                runtime_env={"env_vars": worker_env(spec.threads)},
            )
            .remote(spec)
            for number in range(count)
        ]
        self._model = "reference model" if teacher_of(spec.cfg) is None else "teacher"
        self._limit_s = limit_s
        # Answers arrive in Ray's threads.
        self._lock = threading.Lock()
        self._unanswered = [0] * count
        self._deadlines = [math.inf] * count
        try:
            ray.get([actor.__ray_ready__.remote() for actor in self._actors], timeout=limit_s)
        except RayError as error:
            raise WorkersLost(
                f"{frozen_model(spec.cfg).section}.num_devices={count}: a process of the {self._model} could "
                f"not be started ({_cause(error)})"
            ) from error

    def log_probs(self, group: Group) -> Future[ReferenceLogProbs]:
        future: Future[ReferenceLogProbs] = Future()
        with self._lock:
            number = min(range(len(self._actors)), key=self._unanswered.__getitem__)
            if self._unanswered[number] == 0:
                self._deadlines[number] = time.monotonic() + self._limit_s
            self._unanswered[number] += 1

        def receive(result: Any) -> None:
            with self._lock:
                self._unanswered[number] -= 1
                waits = self._unanswered[number] > 0
                self._deadlines[number] = time.monotonic() + self._limit_s if waits else math.inf
            if isinstance(result, BaseException):
                future.set_exception(_lost(self._model, result))
            else:
                future.set_result(result)

        responses = [response.token_ids for response in group.responses]
        prompt = group.teacher_prompt or group.prompt
        files = None if group.pictures is None else group.pictures.files
        call_when_done(self._actors[number].log_probs.remote(prompt, responses, files), receive)
        return future

    def deadline(self) -> float:
        with self._lock:
            return min(self._deadlines)

    def restart_timed_out(self) -> None:
        now = time.monotonic()
        with self._lock:
            silent = [number for number, deadline in enumerate(self._deadlines) if deadline <= now]
            for number in silent:
                self._deadlines[number] = now + self._limit_s
        for number in silent:
            # Ray restarts the killed actor and resends its requests.
            ray.kill(self._actors[number], no_restart=False)


def _cause(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # Ray's message starts with how Ray noticed the death, and its last line names the cause.
    return lines[-1 if isinstance(error, RayActorError) else 0].strip()


def _lost(model: str, error: BaseException) -> WorkersLost:
    died = "it died more than collector.max_restarts times; " if isinstance(error, RayActorError) else ""
    lost = WorkersLost(
        f"a process of the {model} failed ({_cause(error)}); {died}fix the cause and go on with resume=auto"
    )
    lost.__cause__ = error
    return lost
