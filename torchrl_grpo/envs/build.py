"""Builds the environment of a configuration, with the order in which its problems are drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrl_grpo.config import Config
from torchrl_grpo.config.derived import has_episodes
from torchrl_grpo.data.mixture import Mixture
from torchrl_grpo.data.problems import Problems
from torchrl_grpo.envs.curriculum import PassRateStream
from torchrl_grpo.envs.group_text import GroupTextEnv
from torchrl_grpo.envs.stream import MixtureStream, PromptStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from torchrl_grpo.rewards.reward_set import MixtureRewardSet, RewardSet


def _stream(cfg: Config, problems: Problems) -> PromptStream:
    if isinstance(problems, Mixture):
        return MixtureStream(problems.train, problems.training_sets, cfg.seed, cfg.env.shuffle)
    if cfg.env.sampling == "pass_rate":
        return PassRateStream(
            problems.train,
            cfg.seed,
            bands=cfg.env.pass_rate_bands,
            weights=cfg.env.pass_rate_weights,
            unseen_weight=cfg.env.unseen_weight,
        )
    return PromptStream(problems.train, cfg.seed, cfg.env.shuffle)


def build_environment(
    cfg: Config,
    problems: Problems,
    reward_set: RewardSet | MixtureRewardSet,
    tokenizer: PreTrainedTokenizerBase,
) -> GroupTextEnv:
    """Build the environment that presents the problems of a run and rewards responses.

    Args:
        cfg: configuration of the run.
        problems: problems with their prompts.
        reward_set: rewards of the run.
        tokenizer: tokenizer that renders the prompts.

    Raises:
        DataError: a prompt is too long.
        ModelError: the chat template cannot render a prompt.
    """
    options = cfg.inference_model
    return GroupTextEnv(
        _stream(cfg, problems),
        tokenizer,
        reward_set,
        num_envs=cfg.env.num_envs,
        repeats=cfg.env.repeats,
        max_prompt_tokens=options.max_model_len - options.max_new_tokens,
        episodes=has_episodes(cfg),
    )
