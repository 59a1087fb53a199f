"""Rounds and optimiser steps of a run, out of its configuration. Imports no torch."""

from __future__ import annotations

from torchrl_grpo.config import Config


def steps_per_round(cfg: Config) -> int:
    """Optimiser steps that a collection round is trained for."""
    size = cfg.env.num_envs * cfg.env.repeats
    return cfg.train.epochs * size // (cfg.train.optim_batch_size or size)


def rounds(cfg: Config) -> int:
    """Collection rounds of the whole run."""
    return cfg.train.total_dialog_turns // (cfg.env.num_envs * cfg.env.repeats)
