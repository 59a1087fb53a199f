"""Checks of the keys of the objective against each other; a part of :mod:`torchrl_grpo.config.checks`.

A value that nothing would read is refused as well, because a user who sets it expects it to take effect.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from torchrl_grpo.config.derived import initial_kl_coef, needs_reference, optim_batch_size
from torchrl_grpo.config.keys import bad_value, show
from torchrl_grpo.config.values import SURROGATE_OPTIONS

if TYPE_CHECKING:
    from torchrl_grpo.config.schema import Config

# What sets a value that other keys contradict.
_SETS = {
    "policy.surrogate=cispo": "policy=cispo",
    "policy.surrogate=sapo": "policy=sapo",
    "policy.surrogate=log_likelihood": "+method=sft",
    "policy.advantage_estimator=maxent": "policy=maxent",
}
_OTHER_ESTIMATOR = "policy=grpo policy.advantage_estimator=group_mean"
# For each optional part of the objective: its name, how to enable it, and the keys that only it reads.
_READ_BY = (
    (
        "policy.advantage_estimator=maxent",
        "policy=maxent",
        ("tau", "q_temperature", "q_epsilon", "length_normalize_ref"),
    ),
    (
        "a policy.correction",
        "policy.proximal=trainer policy.correction=truncate",
        ("correction_level", "correction_cap"),
    ),
    ("a policy.kl_target", "policy.kl_target=0.1", ("kl_horizon",)),
    ("a policy.entropy_target", "policy.entropy_target=1.0", ("entropy_delta", "entropy_coef_max")),
    ("policy.constant_groups=refill", "policy.constant_groups=refill", ("max_refills",)),
)


def check_policy(cfg: Config) -> None:
    """Check ``policy.*`` and ``ref_model.refresh_*``.

    Raises:
        ConfigError: a value is invalid; the error names the first one found.
    """
    policy = cfg.policy
    if cfg.env.repeats == 1 and policy.advantage_estimator != "reward":
        raise bad_value(
            "env.repeats", 1, "must be at least 2 (a group of one has no advantage)", "env.repeats=8"
        )
    if policy.advantage_estimator == "reward" and policy.reward_combination == "apart":
        wrong = "nothing is normalized with policy.advantage_estimator=reward"
        raise bad_value("policy.reward_combination", "apart", wrong, "policy.reward_combination=together")
    if policy.kl_in == "loss" and needs_reference(policy) and policy.kl_estimator == "k1":
        wrong = "in the loss its gradient is zero on average, so it would only add noise"
        raise bad_value(
            "policy.kl_estimator", "k1", wrong, "policy.kl_estimator=k2 or k3, or policy.kl_in=reward"
        )
    if policy.dual_clip is not None and policy.surrogate != "clip":
        wrong = f"{_as_set('policy.surrogate', policy.surrogate)} has no such bound, and only clip has one"
        good = (
            f"policy.dual_clip=null, or policy=grpo policy.surrogate=clip policy.dual_clip={policy.dual_clip}"
        )
        raise bad_value("policy.dual_clip", policy.dual_clip, wrong, good)
    _check_surrogate_args(cfg)
    _check_unread(cfg)
    _check_coefficients(cfg)
    _check_off_policy(cfg)
    _check_maxent(cfg)
    length, buffer = cfg.inference_model.max_new_tokens, policy.overlong_buffer
    for key, tokens, mode, good in (
        ("overlong_buffer", policy.overlong_buffer, policy.overlong, "overlong=penalise"),
        ("aggregation_length", policy.aggregation_length, policy.aggregation, "aggregation=constant"),
    ):
        if tokens is not None and not good.endswith(f"={mode}"):
            wrong = f"is only read with policy.{good}"
            raise bad_value(
                f"policy.{key}", tokens, wrong, f"policy.{good} policy.{key}={tokens}, or policy.{key}=null"
            )
    if buffer is not None and buffer > length:
        wrong = f"is longer than a response, inference_model.max_new_tokens={length}"
        raise bad_value("policy.overlong_buffer", buffer, wrong, "policy.overlong_buffer=null")


def _as_set(key: str, value: str) -> str:
    """Return a key with its value, and the preset that sets it."""
    by = _SETS.get(f"{key}={value}")
    return f"{key}={value}{'' if by is None else f', as {by} sets it,'}"


def _check_surrogate_args(cfg: Config) -> None:
    surrogate = cfg.policy.surrogate
    known = SURROGATE_OPTIONS[surrogate]
    for name, value in cfg.policy.surrogate_args.items():
        key = f"policy.surrogate_args.{name}"
        if name not in known:
            wrong = f"{_as_set('policy.surrogate', surrogate)} has {', '.join(known) or 'no options'}"
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            good = f"policy.surrogate_args.{close[0]}={value}" if close else "policy.surrogate_args={}"
            if reader := next((other for other, names in SURROGATE_OPTIONS.items() if name in names), None):
                good += f", or policy.surrogate={reader} {key}={value}"
            raise bad_value(key, value, wrong, good)
        if value <= 0:
            raise bad_value(key, value, "must be greater than 0", f"{key}={known[name]}")


def _check_unread(cfg: Config) -> None:
    policy = cfg.policy
    used = (
        policy.advantage_estimator == "maxent",
        policy.correction != "none",
        policy.kl_target is not None,
        policy.entropy_target is not None,
        policy.constant_groups == "refill",
    )
    defaults = vars(type(policy)())
    for (part, switch, names), on in zip(_READ_BY, used, strict=True):
        for name in names:
            value, default = vars(policy)[name], defaults[name]
            if not on and value != default:
                if name == "kl_horizon" and initial_kl_coef(policy) == 0:
                    # policy.kl_target scales the coefficient, so the coefficient must not be 0.
                    switch = f"policy.init_kl_coeff=0.1 {switch}"
                works = show(_accepted(name, value, cfg))
                good = f"{switch} policy.{name}={works}, or policy.{name}={show(default)}"
                raise bad_value(f"policy.{name}", value, f"is only read with {part}", good)


def _accepted(name: str, value: Any, cfg: Config) -> Any:
    """Return the value of an unread key, or the nearest value that is accepted once the key is read."""
    if name == "kl_horizon":
        return max(value, optim_batch_size(cfg))
    if name == "q_epsilon":
        return min(value, 1 / cfg.env.repeats)
    if name == "entropy_coef_max":
        return max(value, cfg.policy.entropy_coef)
    return value


def _check_coefficients(cfg: Config) -> None:
    policy = cfg.policy
    if policy.kl_target is not None and initial_kl_coef(policy) == 0:
        wrong = "can only scale a coefficient, and that starts at 0"
        good = f"policy.init_kl_coeff=0.1 policy.kl_target={policy.kl_target}"
        raise bad_value("policy.kl_target", policy.kl_target, wrong, good)
    if policy.init_kl_coeff is not None and policy.kl_coef not in (0, policy.init_kl_coeff):
        wrong = f"is where the coefficient starts, and so is policy.kl_coef={policy.kl_coef}"
        raise bad_value("policy.init_kl_coeff", policy.init_kl_coeff, wrong, "one of the two")
    if policy.kl_target is None and policy.init_kl_coeff not in (None, policy.kl_coef):
        wrong = "is where an adapted coefficient starts, and without policy.kl_target none is adapted"
        good = f"policy.kl_coef={policy.init_kl_coeff:g}"
        raise bad_value("policy.init_kl_coeff", policy.init_kl_coeff, wrong, good)
    if policy.reward_combination == "apart" and policy.kl_in == "reward" and needs_reference(policy):
        wrong = "with policy.reward_combination=apart the normalization would take its coefficient out again"
        raise bad_value("policy.kl_in", "reward", wrong, "policy.kl_in=loss")
    batch = optim_batch_size(cfg)
    if policy.kl_target is not None and policy.kl_horizon < batch:
        wrong = f"is less than one optimizer batch, {batch} responses"
        raise bad_value("policy.kl_horizon", policy.kl_horizon, wrong, f"policy.kl_horizon={20 * batch}")
    if policy.entropy_target is not None and policy.entropy_coef > policy.entropy_coef_max:
        wrong = f"is above policy.entropy_coef_max={policy.entropy_coef_max}"
        raise bad_value("policy.entropy_coef", policy.entropy_coef, wrong, "policy.entropy_coef=0.001")
    _check_reference(cfg)


def _check_reference(cfg: Config) -> None:
    policy, ref_model = cfg.policy, cfg.ref_model
    if ref_model.refresh_mix < 1 and ref_model.refresh_frequency == 0:
        wrong = "is only read with a ref_model.refresh_frequency above 0"
        raise bad_value("ref_model.refresh_mix", ref_model.refresh_mix, wrong, "ref_model.refresh_mix=1.0")
    if ref_model.refresh_mix < 1 and ref_model.dtype not in ("auto", "float32"):
        wrong = "holds too few digits for the steps of ref_model.refresh_mix, most of which would round to 0"
        raise bad_value("ref_model.dtype", ref_model.dtype, wrong, "ref_model.dtype=float32")
    if cfg.ref_model.refresh_frequency > 0 and not needs_reference(policy):
        wrong = "there is no reference model, because policy.kl_coef is 0"
        raise bad_value(
            "ref_model.refresh_frequency",
            cfg.ref_model.refresh_frequency,
            wrong,
            f"policy.kl_coef=0.01 ref_model.refresh_frequency={ref_model.refresh_frequency}",
        )


def _check_off_policy(cfg: Config) -> None:
    policy = cfg.policy
    if policy.correction != "none" and policy.proximal != "trainer":
        wrong = (
            "weighs the trainer's log-probabilities against the engine's, and "
            f"policy.proximal={policy.proximal} has none"
        )
        good = f"policy.proximal=trainer policy.correction={policy.correction}"
        raise bad_value("policy.correction", policy.correction, wrong, good)
    if policy.correction_floor > 0 and policy.correction != "mask":
        wrong = f"is not read with policy.correction={policy.correction}"
        good = f"policy.correction=mask policy.correction_floor={policy.correction_floor}"
        if policy.proximal != "trainer":
            good = f"policy.proximal=trainer {good}"
        raise bad_value("policy.correction_floor", policy.correction_floor, wrong, good)


def _check_maxent(cfg: Config) -> None:
    policy = cfg.policy
    maxent = policy.advantage_estimator == "maxent"
    if maxent != (policy.kl_in == "weights") and (maxent or needs_reference(policy)):
        weights = _as_set("policy.advantage_estimator", "maxent")
        if maxent:
            wrong = f"{weights} takes the reference into its weights"
            good = f"policy.kl_in=weights, or {_OTHER_ESTIMATOR} policy.kl_in={policy.kl_in}"
        else:
            wrong = f"only {weights} has such weights, and it is {policy.advantage_estimator}"
            good = "policy.kl_in=loss, or policy.advantage_estimator=maxent policy.kl_in=weights"
        raise bad_value("policy.kl_in", policy.kl_in, wrong, good)
    if not maxent:
        return
    if policy.reward_combination == "apart":
        wrong = f"{_as_set('policy.advantage_estimator', 'maxent')} takes one sum of rewards for a response"
        good = f"policy.reward_combination=together, or {_OTHER_ESTIMATOR} policy.reward_combination=apart"
        raise bad_value("policy.reward_combination", "apart", wrong, good)
    if policy.tau + initial_kl_coef(policy) <= 0:
        wrong = "with policy.kl_coef=0 the best response would take all, divided by 0"
        raise bad_value("policy.tau", policy.tau, wrong, "policy.tau=0.1")
    if policy.q_epsilon * cfg.env.repeats > 1:
        wrong = f"is more than 1 / env.repeats={cfg.env.repeats}"
        raise bad_value("policy.q_epsilon", policy.q_epsilon, wrong, "policy.q_epsilon=1e-6")
