"""The built-in data sets, rewards, environments and tools. This is the only place where they are registered.

Each name of the configuration is mapped to the import path of a module, or of a function or class in one:
``PACKAGE.MODULE:NAME``, as users write it for code of their own. Nothing is imported before it is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BuiltInDataset:
    """A data set that ``env.dataset`` can name.

    Attributes:
        module: module with ``load(cfg) -> Problems`` and ``example(row, env, id) -> Example``.
        weights: ``reward.weights`` of a configuration that has none.
        eval_reward: reward that grades the evaluation if several could, or none has a positive weight.
    """

    module: str
    weights: Mapping[str, float]
    eval_reward: str


@dataclass(frozen=True)
class BuiltInReward:
    """A reward that ``reward.weights`` can name.

    Attributes:
        build: function of the configuration that returns the reward.
        datasets: data sets whose ground truths it can read.
        is_correctness: whether it says that a response is correct. Such rewards can grade the evaluation.
        needs_answer: whether it compares a response with the answer of its problem.
        grader: class of the grader that takes its place in the evaluation. Without one, a full score of 1
            counts as correct.
    """

    build: str
    datasets: tuple[str, ...]
    is_correctness: bool = False
    needs_answer: bool = False
    grader: str | None = None


_DATA = "torchrl_grpo.data"
DATASETS = {
    "gsm8k": BuiltInDataset(f"{_DATA}.gsm8k", {"gsm8k": 1.0, "format": 0.1}, "gsm8k"),
    "math": BuiltInDataset(f"{_DATA}.math", {"math_verify": 1.0, "format": 0.1}, "math_verify"),
    "ifeval": BuiltInDataset(f"{_DATA}.ifeval.load", {"ifeval": 1.0}, "ifeval"),
    "reasoning_gym": BuiltInDataset(f"{_DATA}.reasoning_gym", {"reasoning_gym": 1.0}, "reasoning_gym"),
    "jsonl": BuiltInDataset(f"{_DATA}.jsonl", {"exact_match": 1.0}, "exact_match"),
    "pictures": BuiltInDataset(f"{_DATA}.picture_tasks", {"exact_match": 1.0, "format": 0.1}, "exact_match"),
    "geometry3k": BuiltInDataset(f"{_DATA}.picture_sets", {"math_verify": 1.0, "format": 0.1}, "math_verify"),
    "clevr_count": BuiltInDataset(
        f"{_DATA}.picture_sets", {"exact_match": 1.0, "format": 0.1}, "exact_match"
    ),
}
#: Data sets whose questions are about pictures.
OF_PICTURES = ("pictures", "geometry3k", "clevr_count")

_ALL = tuple(DATASETS)
_ANSWERS = ("gsm8k", "math", "jsonl", *OF_PICTURES)
_REWARDS = "torchrl_grpo.rewards"
REWARDS = {
    "gsm8k": BuiltInReward(
        f"{_REWARDS}.gsm8k:build",
        _ANSWERS,
        is_correctness=True,
        needs_answer=True,
        grader=f"{_REWARDS}.graders:Gsm8kGrader",
    ),
    "format": BuiltInReward(f"{_REWARDS}.format:build", _ALL),
    "math_verify": BuiltInReward(
        f"{_REWARDS}.sandbox.math_verify:build", _ANSWERS, is_correctness=True, needs_answer=True
    ),
    "reasoning_gym": BuiltInReward(
        f"{_REWARDS}.reasoning_gym:build", ("reasoning_gym",), is_correctness=True
    ),
    "bare_number": BuiltInReward(f"{_REWARDS}.text:build_bare_number", _ALL),
    "closeness": BuiltInReward(
        f"{_REWARDS}.text:build_closeness", (*_ANSWERS, "reasoning_gym"), needs_answer=True
    ),
    "ifeval": BuiltInReward(
        f"{_REWARDS}.ifeval.reward:build",
        ("ifeval",),
        is_correctness=True,
        grader=f"{_REWARDS}.ifeval.reward:IFEvalGrader",
    ),
    "exact_match": BuiltInReward(
        f"{_REWARDS}.text:build_exact_match", _ANSWERS, is_correctness=True, needs_answer=True
    ),
    "environment": BuiltInReward(f"{_REWARDS}.environment:build", _ALL, is_correctness=True),
}
#: Names that no reward can have, because the metrics reward/<name> are of all rewards.
NO_REWARDS = ("mean", "std", "constant_groups", "errors", "error_share")
#: Rewards that another model gives, by what ``reward.functions`` calls them or begins with -> function of the
#: configuration, the reward's name and the folder of the run that returns the reward.
MODEL_REWARDS = {
    "judge": f"{_REWARDS}.judge.reward:build",
    "hf:": f"{_REWARDS}.reward_model:build",
}

_EPISODES = "torchrl_grpo.envs.episodes"
#: Name -> class of the environment, which is created with ``env.environment_args``.
ENVIRONMENTS = {
    "guess": f"{_EPISODES}.guess:Guess",
    "countdown": f"{_EPISODES}.countdown:Countdown",
    "shell": f"{_EPISODES}.shell_task:ShellTask",
}
#: Name -> function that returns the tool.
TOOLS = {
    "calculator": f"{_EPISODES}.tools.calculator:build",
    "python": f"{_EPISODES}.tools.python_tool:build",
    "shell": f"{_EPISODES}.tools.shell_tool:build",
}


def load_built_in(path: str) -> Any:
    """Import the module of a path of these tables, and return the object that the path names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def dataset_kind(dataset: str) -> str:
    """Return the built-in data set whose rewards and prompts a data set has: jsonl for one of the user."""
    return "jsonl" if ":" in dataset else dataset
