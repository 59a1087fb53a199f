"""Quantities that follow from a configuration, and from how many problems there are."""

from __future__ import annotations

import math
from dataclasses import replace

from torchrl_grpo.config.schema import (
    Config,
    InferenceModelConfig,
    PolicyConfig,
    RefModelConfig,
    TrainModelConfig,
)

# Tokens of a micro-batch that nobody has said anything about: large enough for matrix products to run at
# full speed, small enough for models of a few billion parameters.
TOKENS = 4096


def optim_batch_size(cfg: Config) -> int:
    """Samples of an optimizer step: ``train.optim_batch_size``, or else a whole collection round."""
    return cfg.train.optim_batch_size or cfg.env.num_envs * cfg.env.repeats


def steps_per_round(cfg: Config) -> int:
    """Optimizer steps that a collection round is trained for."""
    return cfg.train.epochs * cfg.env.num_envs * cfg.env.repeats // optim_batch_size(cfg)


def with_turns(cfg: Config, problems: int) -> Config:
    """A configuration whose length is in samples: ``train.num_epochs`` turned into ``total_dialog_turns``.

    Args:
        cfg: a validated configuration.
        problems: to train on, those left out for their length not counted.

    Returns:
        The same where it says ``train.total_dialog_turns``. Otherwise as many collection rounds as ask every
        problem ``train.num_epochs`` times, the last round filled up with problems of the next epoch.
    """
    if cfg.train.num_epochs is None:
        return cfg
    # Rounded, because 0.1 x 30 is a little more than 3.
    asked = math.ceil(round(cfg.train.num_epochs * problems, 6))
    turns = max(1, math.ceil(asked / cfg.env.num_envs)) * cfg.env.num_envs * cfg.env.repeats
    return replace(cfg, train=replace(cfg.train, total_dialog_turns=turns, num_epochs=None))


def total_turns(cfg: Config) -> int:
    """Samples of the whole run, of a configuration out of :func:`with_turns`."""
    assert cfg.train.total_dialog_turns is not None, "a length in epochs needs the data: with_turns()"
    return cfg.train.total_dialog_turns


def rounds(cfg: Config) -> int:
    """Collection rounds of the whole run, of a configuration out of :func:`with_turns`."""
    return total_turns(cfg) // (cfg.env.num_envs * cfg.env.repeats)


def length(cfg: Config, problems: int) -> str:
    """How long a run is, in a line."""
    whole = with_turns(cfg, problems)
    epochs = rounds(whole) * cfg.env.num_envs / problems
    refilled = ", and more for refills" if cfg.policy.constant_groups == "refill" else ""
    return (
        f"length: {rounds(whole)} rounds of {cfg.env.num_envs} problems x {cfg.env.repeats} samples, "
        f"{rounds(whole) * steps_per_round(whole)} optimizer steps, {epochs:.3g} times {problems} problems"
        f"{refilled}"
    )


def token_budget(cfg: Config) -> int:
    """Tokens in a micro-batch at most; never less than the longest sequence, which cannot be cut."""
    return cfg.train.max_tokens_per_microbatch or max(TOKENS, cfg.inference_model.max_model_len)


def kl_start(policy: PolicyConfig) -> float:
    """The KL coefficient at the start of a run."""
    return policy.kl_coef if policy.init_kl_coeff is None else policy.init_kl_coeff


def needs_reference(policy: PolicyConfig) -> bool:
    """Whether anything reads the reference model's log-probabilities."""
    return kl_start(policy) != 0 or policy.kl_target is not None


def num_devices(section: TrainModelConfig | RefModelConfig | InferenceModelConfig) -> int:
    """Devices that a section asks for: one with ``num_devices=auto`` and no list of devices."""
    if isinstance(section.num_devices, int):
        return section.num_devices
    return 1 if section.devices is None else len(section.devices)
