"""``reasoning_gym``: what the task's own scorer says about the answer.

The scorers run in worker processes: several of them hand the model's text to sympy, which can take for ever.
"""

from __future__ import annotations

from torchrl_grpo.data.example import Example
from torchrl_grpo.rewards import extract
from torchrl_grpo.rewards.sandbox.pool import WorkerPool

JOB = "torchrl_grpo.rewards.sandbox.gym_job:run"


class ReasoningGymReward:
    """The task's own score, in 0 to 1; some tasks give partial credit.

    Args:
        answer_format: where the answer stands, see :func:`~torchrl_grpo.rewards.extract.answer`; a
            completion without one earns 0.
        timeout_s: seconds one call of the scorer may take.
        workers: number of processes.
        job: ``"module:function"`` of the scorer, for tests.
    """

    name = "reasoning_gym"

    def __init__(self, answer_format: str, timeout_s: float, workers: int, job: str = JOB) -> None:
        self._format = answer_format
        self._pool = WorkerPool(job, workers, timeout_s)

    def __call__(self, completion: str, example: Example) -> float:
        """The score.

        Raises:
            JobTimeout: the scorer took too long.
            JobError: it raised, or its process died.
        """
        answer = extract.answer(completion, self._format)
        if answer is None:
            return 0.0
        return float(self._pool.call({"answer": answer, "truth": example.truth}))

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()
