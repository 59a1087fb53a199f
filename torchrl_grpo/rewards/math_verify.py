"""``math_verify``: is the answer mathematically equal to the truth?

A comparison that raises, hangs or kills its process is an error
(:class:`~torchrl_grpo.rewards.sandbox.pool.JobError`), never a quiet 0.
"""

from __future__ import annotations

from torchrl_grpo.data.example import Example
from torchrl_grpo.rewards import extract
from torchrl_grpo.rewards.sandbox.pool import WorkerPool

JOB = "torchrl_grpo.rewards.sandbox.math_job:run"


class MathVerifyReward:
    """1.0 for an answer that is mathematically equal to the truth.

    The answer is the content of the last closed ``<answer>`` tag; without one it is whatever math_verify
    finds in the whole text, whatever ``env.answer_format`` says: the ``format`` reward is what teaches the
    tags.

    Args:
        timeout_s: seconds one comparison may take.
        workers: number of processes, so of comparisons at a time.
        job: ``"module:function"`` of the comparison, for tests.
    """

    name = "math_verify"

    def __init__(self, timeout_s: float, workers: int, job: str = JOB) -> None:
        self._pool = WorkerPool(job, workers, timeout_s)

    def __call__(self, completion: str, example: Example) -> float:
        """0 or 1.

        Raises:
            JobTimeout: the comparison took too long.
            JobError: it raised, or its process died.
        """
        answer = extract.tagged(completion)
        if answer is None:
            answer = completion
        if not answer.strip():
            return 0.0
        return float(self._pool.call({"answer": answer, "truth": example.truth["answer"]}))

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()
