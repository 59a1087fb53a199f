"""What one of the two scripts cannot do and the other can."""

from __future__ import annotations

from torchrl_grpo.config import Config
from torchrl_grpo.config_keys import bad_value
from torchrl_grpo.rounds import steps_per_round


def check_sync(cfg: Config) -> None:
    """Check what ``grpo.py`` asks for beyond :func:`~torchrl_grpo.validation.validate`.

    Raises:
        ConfigError: several engines.
    """
    count = cfg.inference_model.num_devices
    if count != 1:
        raise bad_value(
            "inference_model.num_devices",
            count,
            "grpo.py generates with one engine; several are workers of grpo-async.py",
            "inference_model.num_devices=1",
        )


def check_async(cfg: Config) -> None:
    """Check what ``grpo-async.py`` asks for beyond :func:`~torchrl_grpo.validation.validate`.

    Raises:
        ConfigError: keys contradict each other.
    """
    age = cfg.collector.max_policy_age
    steps = steps_per_round(cfg)
    frequency = cfg.train.weight_update_frequency or steps
    # Weights of step v serve rounds until the next publication: the last of them begins this much later.
    oldest = -(-frequency // steps) - 1
    if oldest > age:
        raise bad_value(
            "train.weight_update_frequency",
            frequency,
            f"weights would be {oldest} rounds of {steps} optimiser steps old before they are replaced, and "
            f"collector.max_policy_age={age} allows less",
            f"train.weight_update_frequency={(age + 1) * steps}",
        )
    if steps % frequency and frequency % steps:
        raise bad_value(
            "train.weight_update_frequency",
            frequency,
            f"must divide a collection round of {steps} optimiser steps, or be a multiple of it",
            f"train.weight_update_frequency={steps}",
        )
    if cfg.collector.partial_rollout and age == 0:
        raise bad_value(
            "collector.partial_rollout",
            True,
            "collector.max_policy_age=0 trains on no response that older weights began",
            "collector.max_policy_age=1",
        )
    if cfg.inference_model.num_devices > cfg.env.num_envs:
        raise bad_value(
            "inference_model.num_devices",
            cfg.inference_model.num_devices,
            f"a round has only env.num_envs={cfg.env.num_envs} groups, and a group is not divided",
            f"inference_model.num_devices={cfg.env.num_envs}",
        )
    if cfg.inference_model.sleep:
        raise bad_value(
            "inference_model.sleep",
            True,
            "workers of grpo-async.py generate while the trainer trains",
            "inference_model.sleep=false",
        )
