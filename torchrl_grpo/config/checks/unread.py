"""Checks of keys that nothing would read. A user who sets one expects it to take effect."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torchrl_grpo.config.contradictions import unread
from torchrl_grpo.config.derived import initial_kl_coef, optim_batch_size
from torchrl_grpo.config.keys import bad_value, show
from torchrl_grpo.config.schema import keys

if TYPE_CHECKING:
    from torchrl_grpo.config.schema import Config

# What sets a value that other keys contradict.
_SETS = {
    "policy.surrogate=cispo": "policy=cispo",
    "policy.surrogate=sapo": "policy=sapo",
    "policy.surrogate=log_likelihood": "+method=sft",
    "policy.advantage_estimator=maxent": "policy=maxent",
    "policy.advantage_estimator=none": "policy=distill",
    "policy.distill_coef=1.0": "policy=distill",
}
# What ``only_with`` of torchrl_grpo.config.keys.key names, which is KEY=VALUE, or KEY for any value but its
# default -> words that turn it on, if it is not enough by itself.
_TURNED_ON = {
    "env.environment": "env.environment=FILE.py:CLASS",
    "policy.advantage_estimator=maxent": "policy=maxent",
    "policy.surrogate=clip": "policy=grpo policy.surrogate=clip",
    "policy.correction": "policy.proximal=trainer policy.correction=truncate",
    "policy.correction=mask": "policy.proximal=trainer policy.correction=mask",
    "policy.kl_target": "policy.kl_target=0.1",
    "policy.entropy_target": "policy.entropy_target=1.0",
    "policy.distill_coef": "policy=distill",
    "train_model.lora.rank": "train_model.lora.rank=16",
    "hub.push": "hub.push=ORG/NAME",
    "ref_model.refresh_frequency": "ref_model.refresh_frequency=100",
}


def check_unread(cfg: Config) -> None:
    """Check that what reads a key is there if the key has another value than its default.

    Raises:
        ConfigError: nothing reads the key.
    """
    for key, setting in unread(lambda name: attrgetter(name)(cfg)):
        value, default = attrgetter(key)(cfg), keys().defaults[key]
        if value == default:
            continue
        name, equals, needed = setting.partition("=")
        wrong = f"it is only read if {name} is not {show(keys().defaults[name])}"
        if equals:
            now = as_set(attrgetter(name)(cfg), name)
            wrong = f"it is only read if {name} is {needed}, and that is {now.removesuffix(',')}"
        words = _TURNED_ON.get(setting, setting)
        if key == "policy.kl_horizon" and initial_kl_coef(cfg.policy) == 0:
            # policy.kl_target scales the coefficient, so the coefficient must not be 0.
            words = f"policy.init_kl_coeff=0.1 {words}"
        fix = f"{words} {key}={show(_accepted(key, value, cfg))}, or {key}={show(default)}"
        raise bad_value(key, value, wrong, fix)


def _accepted(key: str, value: Any, cfg: Config) -> Any:
    """Return the value of an unread key, or the nearest value that is accepted once the key is read."""
    if key == "policy.kl_horizon":
        return max(value, optim_batch_size(cfg))
    if key == "policy.q_epsilon":
        return min(value, 1 / cfg.env.repeats)
    return max(value, cfg.policy.entropy_coef) if key == "policy.entropy_coef_max" else value


def as_set(value: Any, key: str) -> str:
    """Return the value of a key, and the preset that sets it."""
    preset = _SETS.get(f"{key}={value}")
    return show(value) if preset is None else f"{show(value)}, as {preset} sets it,"


def check_unset(cfg: Config, section: str, names: str, wrong: str, also: str = "") -> None:
    """Check that keys of a section have their defaults.

    Args:
        cfg: configuration.
        section: dotted name of the section.
        names: keys of the section, with spaces between them.
        wrong: why another value is wrong, as :func:`~torchrl_grpo.config.keys.bad_value` takes it.
        also: what to write beside the default.

    Raises:
        ConfigError: one has another value.
    """
    for key in (f"{section}.{name}" for name in names.split()):
        value, default = attrgetter(key)(cfg), keys().defaults[key]
        if value != default:
            raise bad_value(key, value, wrong, f"{key}={show(default)}{also}")
