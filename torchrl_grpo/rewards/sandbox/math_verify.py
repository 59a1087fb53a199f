"""``math_verify``: mathematical equality of answer and truth.

The parsers evaluate what the model wrote. So each answer is compared in a copy of a worker process, which
ends with the answer and, unless ``reward.sandbox=false``, can do no harm
(:mod:`torchrl_grpo.rewards.sandbox.judged_apart`). A comparison that raises, hangs or kills its process
is an error (:class:`~torchrl_grpo.rewards.sandbox.pool.JobError`), never a silent 0.
"""

from __future__ import annotations

from torchrl_grpo.config import Config
from torchrl_grpo.data.example import Example
from torchrl_grpo.rewards import extract
from torchrl_grpo.rewards.sandbox.pool import WorkerPool, reward_isolation
from torchrl_grpo.rewards.sandbox.worker import Isolation

JOB = "torchrl_grpo.rewards.sandbox.math_job:run"


class MathVerifyReward:
    """1.0 for an answer that is mathematically equal to the truth.

    The answer is the content of the last closed ``<answer>`` tag. Without such a tag, math_verify searches
    the whole text. ``env.answer_format`` is not read: a response with or without tags is graded, and the
    ``format`` reward can ask for them.

    Args:
        timeout_s: time limit of one comparison in seconds.
        workers: number of processes, and so of parallel comparisons.
        isolation: where the comparison runs.
        job: ``"module:function"`` of the comparison; tests replace it.
    """

    name = "math_verify"

    def __init__(
        self, timeout_s: float, workers: int, isolation: Isolation = Isolation.sandbox, job: str = JOB
    ) -> None:
        # Each worker calls math_job.prepare() once. Jobs of tests have no prepare().
        setup: dict[str, str] | None = {} if job == JOB else None
        self._pool = WorkerPool(job, workers, timeout_s, isolation=isolation, setup=setup)

    def __call__(self, completion: str, example: Example) -> float:
        """Return 0 or 1.

        Raises:
            JobTimeout: the comparison took too long.
            JobError: the comparison raised, or its process died.
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


def build(cfg: Config) -> MathVerifyReward:
    """Return the reward of a configuration; ``reward`` is read."""
    isolation = reward_isolation(cfg.reward, MathVerifyReward.name)
    return MathVerifyReward(cfg.reward.timeout_s, cfg.reward.workers, isolation)
