"""What one of the two scripts cannot do and the other can."""

from __future__ import annotations

from torchrl_grpo.config import Config, InferenceModelConfig, RefModelConfig
from torchrl_grpo.config_keys import bad_value
from torchrl_grpo.devices import num_devices
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.rounds import steps_per_round


def check_sync(cfg: Config) -> None:
    """Check what ``grpo.py`` asks for beyond :func:`~torchrl_grpo.validation.validate`.

    Raises:
        ConfigError: several engines.
    """
    _check_ranks(cfg)
    if num_devices(cfg.inference_model) > 1 and not cfg.dry_run:
        raise _several(
            cfg.inference_model,
            "inference_model",
            "grpo.py generates on one device in this version, and only plans one engine over several "
            "(dry_run=true); several are workers of grpo-async.py",
        )


def check_async(cfg: Config) -> None:
    """Check what ``grpo-async.py`` asks for beyond :func:`~torchrl_grpo.validation.validate`.

    Raises:
        ConfigError: keys contradict each other.
    """
    _check_ranks(cfg)
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
    workers = num_devices(cfg.inference_model)
    if workers > cfg.env.num_envs:
        raise bad_value(
            "inference_model.num_devices",
            workers,
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


def _check_ranks(cfg: Config) -> None:
    """Refuse more training ranks than can share a batch, and several devices for the reference."""
    ranks = num_devices(cfg.train_model)
    groups = (cfg.train.optim_batch_size or cfg.env.num_envs * cfg.env.repeats) // cfg.env.repeats
    if ranks > groups:
        raise bad_value(
            "train_model.num_devices",
            ranks,
            f"an optimiser batch has only {groups} groups, and a group is trained on one rank",
            f"train_model.num_devices={groups}",
        )
    if num_devices(cfg.ref_model) > 1 and not cfg.dry_run:
        later = "several devices are not supported by this version, which only plans them (dry_run=true)"
        raise _several(cfg.ref_model, "ref_model", later)


def _several(section: RefModelConfig | InferenceModelConfig, name: str, wrong: str) -> ConfigError:
    if section.devices is not None:
        return bad_value(f"{name}.devices", section.devices, wrong, f"{name}.devices=[{section.devices[0]}]")
    return bad_value(f"{name}.num_devices", section.num_devices, wrong, f"{name}.num_devices=1")
