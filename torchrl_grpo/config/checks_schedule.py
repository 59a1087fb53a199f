"""What one of the two scripts cannot do and the other can."""

from __future__ import annotations

from torchrl_grpo.config.derived import num_devices, optim_batch_size, steps_per_round
from torchrl_grpo.config.keys import bad_value, show
from torchrl_grpo.config.schema import Config, InferenceModelConfig, TrainModelConfig
from torchrl_grpo.errors import ConfigError


def check_sync(cfg: Config) -> None:
    """Check what ``grpo.py`` asks for beyond :func:`~torchrl_grpo.config.checks.validate`.

    Raises:
        ConfigError: several engines.
    """
    _check_ranks(cfg)


def check_in_turn(cfg: Config) -> None:
    """Check what ``grpo.py`` asks for where its engines are workers: an age of zero, as in grpo-async.py.

    Raises:
        ConfigError: keys contradict each other, or there are more workers than groups.
    """
    _check_rounds(cfg, 0, "and engines in processes of their own allow none (docs/devices.md)")
    _check_workers(cfg)


def check_async(cfg: Config) -> None:
    """Check what ``grpo-async.py`` asks for beyond :func:`~torchrl_grpo.config.checks.validate`.

    Raises:
        ConfigError: keys contradict each other.
    """
    _check_ranks(cfg)
    age = cfg.collector.max_policy_age
    _check_rounds(cfg, age, f"and collector.max_policy_age={age} allows less")
    if cfg.collector.partial_rollout and age == 0:
        raise bad_value(
            "collector.partial_rollout",
            True,
            "collector.max_policy_age=0 trains on no response that older weights began",
            "collector.max_policy_age=1",
        )
    _check_workers(cfg)
    if cfg.inference_model.sleep:
        raise bad_value(
            "inference_model.sleep",
            True,
            "workers of grpo-async.py generate while the trainer trains",
            "inference_model.sleep=false",
        )


def may_sleep(cfg: Config) -> bool:
    """Whether an engine that loses its weights while it sleeps is given new ones before each round."""
    return (
        cfg.train.weight_update_frequency is None
        or not steps_per_round(cfg) % cfg.train.weight_update_frequency
    )


def check_sleep(cfg: Config) -> None:
    """Check what an engine that sleeps while the trainer trains asks for, whoever chose that it does.

    Raises:
        ConfigError: it would have to generate without weights.
    """
    if not may_sleep(cfg):
        steps = steps_per_round(cfg)
        raise bad_value(
            "train.weight_update_frequency",
            cfg.train.weight_update_frequency,
            "an engine that sleeps while the trainer trains loses its weights, and needs new ones before "
            f"each round of {steps} optimizer steps",
            f"train.weight_update_frequency={steps} or inference_model.sleep=false",
        )


def _check_rounds(cfg: Config, age: int, allowed: str) -> None:
    """Check that publications keep to rounds, and come often enough for an age of ``age``."""
    steps = steps_per_round(cfg)
    frequency = cfg.train.weight_update_frequency or steps
    # Weights of step v serve rounds until the next publication: the last of them begins this much later.
    oldest = -(-frequency // steps) - 1
    if oldest > age:
        raise bad_value(
            "train.weight_update_frequency",
            frequency,
            f"weights would be {oldest} rounds of {steps} optimizer steps old before they are replaced, "
            f"{allowed}",
            f"train.weight_update_frequency={(age + 1) * steps}",
        )
    if steps % frequency and frequency % steps:
        raise bad_value(
            "train.weight_update_frequency",
            frequency,
            f"must divide a collection round of {steps} optimizer steps, or be a multiple of it",
            f"train.weight_update_frequency={steps}",
        )


def _check_workers(cfg: Config) -> None:
    workers = num_devices(cfg.inference_model)
    if workers > cfg.env.num_envs:
        wrong = f"a round has only env.num_envs={cfg.env.num_envs} groups, and a group is not divided"
        raise _too_many("inference_model", cfg.inference_model, wrong, cfg.env.num_envs)


def _check_ranks(cfg: Config) -> None:
    """Refuse more training ranks than can share a batch."""
    ranks = num_devices(cfg.train_model)
    groups = optim_batch_size(cfg) // cfg.env.repeats
    if ranks > groups:
        wrong = f"an optimizer batch has only {groups} groups, and a group is trained on one rank"
        raise _too_many("train_model", cfg.train_model, wrong, groups)


def _too_many(
    name: str, section: TrainModelConfig | InferenceModelConfig, wrong: str, most: int
) -> ConfigError:
    """The error for more devices of a role than can work, in the words that they were asked for in."""
    if section.devices is None:
        return bad_value(f"{name}.num_devices", num_devices(section), wrong, f"{name}.num_devices={most}")
    fewer = section.devices[:most]
    good = f"{name}.devices={show(fewer)}"
    if section.num_devices != "auto":
        good += f" {name}.num_devices={most}"
    return bad_value(f"{name}.devices", section.devices, wrong, good)
