"""Quantities that are derived from a configuration and from the number of problems."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from torchrl_grpo.config.schema import (
    Config,
    InferenceModelConfig,
    ModelConfig,
    PolicyConfig,
    RefModelConfig,
    TeacherName,
    TrainModelConfig,
)
from torchrl_grpo.config.values import Dtype

# Default number of tokens in a micro-batch: large enough for matrix products to run at full speed, small
# enough for models of a few billion parameters.
TOKENS = 4096
# Most held-out problems by default.
HELD_OUT = 200


def optim_batch_size(cfg: Config) -> int:
    """Return the samples per optimizer step: ``train.optim_batch_size``, or a collection round if unset."""
    return cfg.train.optim_batch_size or cfg.env.num_envs * cfg.env.repeats


def steps_per_round(cfg: Config) -> int:
    """Return the number of optimizer steps per collection round."""
    return cfg.train.epochs * cfg.env.num_envs * cfg.env.repeats // optim_batch_size(cfg)


def with_total_turns(cfg: Config, problems: int) -> Config:
    """Convert ``train.num_epochs`` of a configuration to ``train.total_dialog_turns``.

    Args:
        cfg: validated configuration.
        problems: number of problems to train on, without those dropped for their length.

    Returns:
        The same configuration if it sets ``train.total_dialog_turns``. Otherwise a copy with enough
        collection rounds to use every problem ``train.num_epochs`` times. Problems of the next epoch fill
        up the last round.
    """
    if cfg.train.num_epochs is None:
        return cfg
    # Rounded, because 0.1 x 30 is a little more than 3.
    prompts = math.ceil(round(cfg.train.num_epochs * problems, 6))
    turns = max(1, math.ceil(prompts / cfg.env.num_envs)) * cfg.env.num_envs * cfg.env.repeats
    return replace(cfg, train=replace(cfg.train, total_dialog_turns=turns, num_epochs=None))


def total_turns(cfg: Config) -> int:
    """Return the samples of the whole run for a configuration from :func:`with_total_turns`."""
    assert cfg.train.total_dialog_turns is not None, "a length in epochs needs the data: with_total_turns()"
    return cfg.train.total_dialog_turns


def rounds(cfg: Config) -> int:
    """Return the collection rounds of the whole run for a configuration from :func:`with_total_turns`."""
    return total_turns(cfg) // (cfg.env.num_envs * cfg.env.repeats)


def passes(cfg: Config, problems: int) -> float:
    """Return how often a run draws each problem, for a configuration from :func:`with_total_turns`."""
    return rounds(cfg) * cfg.env.num_envs / problems


def describe_length(cfg: Config, problems: int | None) -> str:
    """Return a line that describes the length of a run.

    Args:
        cfg: configuration; one with ``train.num_epochs`` needs the number of problems.
        problems: number of problems to train on; None if unknown.
    """
    whole = with_total_turns(cfg, problems or 0)
    times = ""
    if problems is not None:
        share = passes(whole, problems)
        times = f"{round(share * problems)} of" if share < 1 else f"{share:.3g} times"
        times = f", {times} {problems} problems"
    refilled = ", and more for refills" if cfg.policy.constant_groups == "refill" else ""
    return (
        f"length: {rounds(whole)} rounds of {cfg.env.num_envs} problems x {cfg.env.repeats} samples, "
        f"{rounds(whole) * steps_per_round(whole)} optimizer steps{times}{refilled}"
    )


def token_budget(cfg: Config) -> int:
    """Return the most tokens of a micro-batch. The longest sequence fits, because none can be divided."""
    return cfg.train.max_tokens_per_microbatch or max(TOKENS, cfg.inference_model.max_model_len)


def initial_kl_coef(policy: PolicyConfig) -> float:
    """Return the KL coefficient at the start of a run."""
    return policy.kl_coef if policy.init_kl_coeff is None else policy.init_kl_coeff


def needs_reference(policy: PolicyConfig) -> bool:
    """Return whether anything reads the reference model's log-probabilities."""
    return initial_kl_coef(policy) != 0 or policy.kl_target is not None


def teacher_of(cfg: Config) -> TeacherName | None:
    """Return the teacher, as the functions take it that load a model; None without distillation."""
    if cfg.policy.distill_coef == 0:
        return None
    assert cfg.teacher_model.name is not None, "the checks have refused it"
    return TeacherName(name=cfg.teacher_model.name, cache_dir=cfg.model.cache_dir)


def models_of(cfg: Config) -> list[ModelConfig]:
    """Return the models that a run loads: the policy's, and the teacher."""
    teacher = teacher_of(cfg)
    return [cfg.model] if teacher is None else [cfg.model, teacher]


def needs_frozen_model(policy: PolicyConfig) -> bool:
    """Return whether a frozen model scores the responses: the reference, or the teacher in its place."""
    return policy.distill_coef != 0 or needs_reference(policy)


class FrozenModel(NamedTuple):
    """Where the frozen model is and how it computes: keys of ``ref_model``, or of ``teacher_model``.

    Attributes:
        section: name of the section.
        num_devices: number of devices, or ``auto``.
        devices: numbers of the GPUs, or None.
        dtype: number format.
    """

    section: str
    num_devices: int | str
    devices: list[int] | None
    dtype: Dtype


def frozen_model(cfg: Config) -> FrozenModel:
    """Return the keys of the frozen model: of the teacher if there is one, and else of the reference."""
    if cfg.policy.distill_coef != 0:
        teacher = cfg.teacher_model
        return FrozenModel(TeacherName.section, teacher.num_devices, teacher.devices, teacher.dtype)
    reference = cfg.ref_model
    return FrozenModel("ref_model", reference.num_devices, reference.devices, reference.dtype)


def held_out_problems(cfg: Config) -> int:
    """Return the largest number of held-out problems."""
    return HELD_OUT if cfg.eval.num_problems is None else cfg.eval.num_problems


def reward_weights(cfg: Config) -> dict[str, float]:
    """Return the weights that a configuration gives, of which a function without one has 1.

    A function that ``eval.reward`` names has none beside other weights: it may only grade.
    """
    weights = cfg.reward.weights
    own = [name for name in cfg.reward.functions if not weights or name != cfg.eval.reward]
    return weights | {name: 1.0 for name in own if name not in weights}


def has_episodes(cfg: Config) -> bool:
    """Return whether a response is an episode of several turns: with an environment, or with tools."""
    return cfg.env.environment is not None or bool(cfg.env.tools)


def num_devices(section: TrainModelConfig | RefModelConfig | InferenceModelConfig) -> int:
    """Return the number of devices that a section requests; one for ``num_devices=auto`` without a list."""
    if isinstance(section.num_devices, int):
        return section.num_devices
    return 1 if section.devices is None else len(section.devices)
