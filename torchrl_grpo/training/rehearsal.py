"""What ``dry_run=true`` does with the data: all that a run does with them before it loads the model.

Data on the hub are read only if ``train.num_epochs`` needs their number, because a plan is also made where
there is no network. The tokenizer of a model that is not in a folder of this machine is never read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from torchrl_grpo.config import Config
from torchrl_grpo.config.derived import has_episodes
from torchrl_grpo.config.mixture import mixture_parts
from torchrl_grpo.data.load import load
from torchrl_grpo.data.problems import Problems
from torchrl_grpo.models.shape import model_folder
from torchrl_grpo.rewards import registry
from torchrl_grpo.rewards.graders import CountingGrader
from torchrl_grpo.rewards.registry import grader_of_run
from torchrl_grpo.rewards.reward_set import MixtureRewardSet, RewardSet, error_text, read_result
from torchrl_grpo.rewards.sandbox.user_reward import UserReward
from torchrl_grpo.rewards.types import BatchReward
from torchrl_grpo.runtime import user_code

# What rewards of the user are tried with, in place of a response.
_RESPONSE = "The answer is 7."


def load_problems(cfg: Config) -> Problems | None:
    """Load the problems of a run; None if they are not the user's own and the plan does not need them.

    Raises:
        UserError: the data are invalid.
    """
    envs = [part.cfg.env for part in mixture_parts(cfg)] or [cfg.env]
    local = all(env.data_path is not None or user_code.parse(env.dataset) is not None for env in envs)
    return load(cfg) if local or cfg.train.num_epochs is not None else None


def check_model_and_environment(cfg: Config) -> None:
    """Refuse a path without a model, and an environment or tools that cannot be loaded.

    Raises:
        UserError: as the run would.
    """
    model_folder(cfg.model)
    if has_episodes(cfg):
        # Imports torch, which takes seconds.
        from torchrl_grpo.envs.episodes.build import check_environment

        check_environment(cfg)


def rehearse(cfg: Config, problems: Problems) -> str:
    """Refuse rewards, problems and a tokenizer that the run would refuse.

    A reward of the user that fails on a short text is warned of on stderr, because it may only need another
    text.

    Returns:
        Two lines: what the run would train on and with which rewards, and what would grade how many problems.

    Raises:
        UserError: as the run would.
    """
    with (
        closing(registry.of_run(cfg, problems)) as reward_set,
        closing(grader_of_run(cfg, problems, reward_set)) as grader,
    ):
        if (folder := model_folder(cfg.model)) is not None:
            _read(cfg, folder, problems, grader)
        for warning in _failing(cfg, problems, reward_set):
            sys.stderr.write(f"warning: {warning}\n")
        weights = zip(reward_set.names, reward_set.weights, strict=True)
        weighted = ", ".join(f"{name} with weight {weight:g}" for name, weight in weights)
        return (
            f"training: {len(problems.train):,} problems, "
            f"{'their solutions' if cfg.train.method == 'sft' else weighted}\n"
            f"held out: {len(problems.held_out):,} problems, graded by {grader.name}\n"
        )


def _failing(cfg: Config, problems: Problems, reward_set: RewardSet | MixtureRewardSet) -> Iterator[str]:
    """Call each function of the user once, as for a group of responses, and yield what is wrong with it."""
    sets = reward_set.sets if isinstance(reward_set, MixtureRewardSet) else {"": reward_set}
    for part, example in problems.first_examples().items():
        for name in sets[part].names:
            reward = sets[part].get(name)
            # Judges and models of rewards cost money or memory.
            if not isinstance(reward, UserReward):
                continue
            try:
                if isinstance(reward, BatchReward):
                    size = cfg.env.repeats
                    results = reward.score_batch([_RESPONSE] * size, [example] * size)
                else:
                    results = [reward(_RESPONSE, example)]
                for result in results:
                    read_result(result)
            except Exception as error:  # noqa: BLE001  of the user's function, and shown
                yield (
                    f"reward.functions.{name} failed when it was tried on the response {_RESPONSE!r} to "
                    f"{example.id} ({error_text(error)}); correct it, unless it only fails on such a text"
                )


def _read(cfg: Config, folder: Path, problems: Problems, grader: CountingGrader) -> None:
    # Imports torch, which takes seconds.
    from torchrl_grpo.models import loading
    from torchrl_grpo.training.prepare import prepare

    tokenizer = loading.load_tokenizer(str(folder.resolve()), cfg.model)
    loading.check_context(str(folder.resolve()), cfg)
    prepare(cfg, tokenizer, problems, grader, lambda text: None)
