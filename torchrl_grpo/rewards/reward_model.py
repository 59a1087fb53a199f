"""The reward of a reward model, ``reward.functions={NAME: hf:MODEL}``, which has a process of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from torchrl_grpo.config import Config
from torchrl_grpo.config.judges import RewardModelConfig, reward_gpu, reward_model_config
from torchrl_grpo.data.example import Example
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.rewards.judge.question import visible
from torchrl_grpo.rewards.sandbox.pool import JobError, WorkerPool
from torchrl_grpo.rewards.stand_ins import one_of, with_stand_ins
from torchrl_grpo.rewards.types import Result
from torchrl_grpo.runtime.paths import expanded

JOB = "torchrl_grpo.envs.reward_model:run"
# Seconds in which a model is downloaded and loaded, as a judge has.
_LOAD_LIMIT_S = 1800.0


class RewardModelReward:
    """The score of a reward model.

    Args:
        name: name of the reward.
        source: name on the hub, or a folder.
        args: arguments of the reward.
        gpu: number of its GPU; None for the CPU.

    Raises:
        ConfigError: the model cannot be loaded, or there is no such GPU.
    """

    def __init__(self, name: str, source: str, args: RewardModelConfig, gpu: int | None) -> None:
        self.name = name
        folder = expanded(source)
        setup = {
            "source": str(folder.resolve()) if folder.is_dir() else source,
            "device": "cpu" if gpu is None else "cuda:0",
            "dtype": args.dtype.value,
            "batch_size": args.batch_size,
            "max_tokens": args.max_tokens,
        }
        label = f"reward.functions.{name}=hf:{source}"
        self._pool = WorkerPool(
            JOB,
            1,
            args.timeout_s,
            label=label,
            setup=setup,
            setup_limit_s=_LOAD_LIMIT_S,
            max_bytes=None,
            gpu=gpu,
        )
        try:
            self._pool.wait_until_started()
        except JobError as error:
            raise ConfigError(f"{error}; correct it, or reward.args.{name}") from error

    def __call__(self, completion: str, example: Example) -> Result:
        """Score one response.

        Raises:
            NoVerdict: the model failed.
        """
        return one_of(self.score_batch([completion], [example]))

    def score_batch(
        self, completions: Sequence[str], examples: Sequence[Example]
    ) -> list[Result | Exception]:
        """Score the responses of a group. Of those that the model fails on, the others' mean stands in."""
        payload = {
            "prompts": [example.plain()["messages"] for example in examples],
            "responses": [visible(completion) for completion in completions],
        }
        try:
            scores: list[float | str] = self._pool.call(payload)
        except JobError as error:
            scores = [str(error)] * len(completions)
        return with_stand_ins(
            [
                score if isinstance(score, str) or math.isfinite(score) else f"the score is {score}"
                for score in scores
            ]
        )

    def close(self) -> None:
        """End the process."""
        self._pool.close()


def build(cfg: Config, name: str, run_folder: Path | None) -> RewardModelReward:
    """Start the process of a reward model.

    Args:
        cfg: configuration; ``reward`` is read.
        name: name of the reward.
        run_folder: not used.

    Raises:
        ConfigError: see :class:`RewardModelReward`.
    """
    source, args = reward_model_config(cfg, name)
    return RewardModelReward(name, source, args, reward_gpu(cfg, name))
