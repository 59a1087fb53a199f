"""``reasoning_gym``: the score of the task's own scorer.

Several scorers evaluate what the model wrote, which may never return or may be code. So each answer is scored
in a process of its own that can do no harm (:mod:`torchrl_grpo.rewards.sandbox.judged_apart`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrl_grpo.config import Config
from torchrl_grpo.data.example import Example
from torchrl_grpo.rewards import extract
from torchrl_grpo.rewards.sandbox.pool import WorkerPool, reward_isolation
from torchrl_grpo.rewards.sandbox.worker import Isolation

JOB = "torchrl_grpo.rewards.sandbox.gym_job:run"


class ReasoningGymReward:
    """The task's own score, in 0 to 1; some tasks give partial credit.

    Args:
        answer_format: format of the answer, see :func:`~torchrl_grpo.rewards.extract.answer`. A completion
            without an answer scores 0.
        timeout_s: time limit of one call of the scorer in seconds.
        workers: number of processes.
        isolation: where the scorer runs.
        task: name and arguments of the task whose scorer is made at the start; None makes it for each answer.
        job: ``"module:function"`` of the scorer; tests replace it.
    """

    name = "reasoning_gym"

    def __init__(
        self,
        answer_format: str,
        timeout_s: float,
        workers: int,
        isolation: Isolation = Isolation.sandbox,
        task: tuple[str, Mapping[str, Any]] | None = None,
        job: str = JOB,
    ) -> None:
        self._format = answer_format
        setup = None if task is None else {"task": task[0], "args": dict(task[1])}
        self._pool = WorkerPool(job, workers, timeout_s, isolation=isolation, setup=setup)

    def __call__(self, completion: str, example: Example) -> float:
        """Return the score.

        Raises:
            JobTimeout: the scorer took too long.
            JobError: the scorer raised, or its process died.
        """
        answer = extract.answer(completion, self._format)
        if answer is None:
            return 0.0
        return float(self._pool.call({"answer": answer, "truth": example.truth}))

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()


def build(cfg: Config) -> ReasoningGymReward:
    """Return the reward of a configuration; ``env.answer_format`` and ``reward`` are read."""
    isolation = reward_isolation(cfg.reward, ReasoningGymReward.name)
    return ReasoningGymReward(
        cfg.env.answer_format,
        cfg.reward.timeout_s,
        cfg.reward.workers,
        isolation,
        None if cfg.env.task is None else (cfg.env.task, cfg.env.task_args),
    )
