"""Checks of the keys of the objective against each other; a part of :mod:`torchrl_grpo.config.checks`."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from torchrl_grpo.config.checks.unread import as_set, check_unset
from torchrl_grpo.config.derived import has_episodes, initial_kl_coef, needs_reference, optim_batch_size
from torchrl_grpo.config.keys import bad_value
from torchrl_grpo.config.values import SURROGATE_OPTIONS

if TYPE_CHECKING:
    from torchrl_grpo.config.schema import Config

_MAXENT = f"policy.advantage_estimator={as_set('maxent', 'policy.advantage_estimator')}"
_OTHER_ESTIMATOR = "policy=grpo policy.advantage_estimator=group_mean"
_HAVE_TEACHER = "policy=distill teacher_model.name=NAME"
_COMBINATION, _TOGETHER = "policy.reward_combination", "policy.reward_combination=together"


def check_policy(cfg: Config) -> None:
    """Check ``policy.*`` and ``ref_model.refresh_*``.

    Raises:
        ConfigError: a value is invalid; the error names the first one found.
    """
    policy = cfg.policy
    has_baseline = policy.advantage_estimator not in ("reward", "none")
    if cfg.env.repeats == 1 and has_baseline:
        wrong = "it must be at least 2, because a group of one has no advantage"
        raise bad_value("env.repeats", 1, wrong, "env.repeats=8")
    if not has_baseline and policy.reward_combination == "apart":
        wrong = f"nothing is normalized with policy.advantage_estimator={policy.advantage_estimator}"
        raise bad_value(_COMBINATION, "apart", wrong, _TOGETHER)
    if policy.kl_in == "loss" and needs_reference(policy) and policy.kl_estimator == "k1":
        wrong = "its gradient is zero on average in the loss, so it would only add noise"
        fix = "policy.kl_estimator=k2, policy.kl_estimator=k3 or policy.kl_in=reward"
        raise bad_value("policy.kl_estimator", "k1", wrong, fix)
    _check_surrogate_args(cfg)
    _check_coefficients(cfg)
    _check_reference(cfg)
    if policy.correction != "none" and policy.proximal != "trainer":
        wrong = (
            "it weighs the trainer's log-probabilities against the engine's, and "
            f"policy.proximal={policy.proximal} has none of the trainer's"
        )
        fix = f"policy.proximal=trainer policy.correction={policy.correction}"
        raise bad_value("policy.correction", policy.correction, wrong, fix)
    _check_maxent(cfg)
    _check_teacher(cfg)
    length, buffer = cfg.inference_model.max_new_tokens, policy.overlong_buffer
    if buffer is not None and buffer > length:
        wrong = f"it is longer than a response, inference_model.max_new_tokens={length}"
        raise bad_value("policy.overlong_buffer", buffer, wrong, "policy.overlong_buffer=null")


def _check_surrogate_args(cfg: Config) -> None:
    surrogate = cfg.policy.surrogate
    known = SURROGATE_OPTIONS[surrogate]
    for name, value in cfg.policy.surrogate_args.items():
        key = f"policy.surrogate_args.{name}"
        if name not in known:
            options = f"the options {', '.join(known)}" if known else "no options"
            wrong = f"policy.surrogate={as_set(surrogate, 'policy.surrogate')} has {options}"
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            fix = f"policy.surrogate_args.{close[0]}={value}" if close else "policy.surrogate_args={}"
            if reader := next((other for other, names in SURROGATE_OPTIONS.items() if name in names), None):
                fix += f", or policy.surrogate={reader} {key}={value}"
            raise bad_value(key, value, wrong, fix)
        if value <= 0:
            raise bad_value(key, value, "it must be greater than 0", f"{key}={known[name]}")


def _check_coefficients(cfg: Config) -> None:
    policy = cfg.policy
    if policy.kl_target is not None and initial_kl_coef(policy) == 0:
        wrong = "it can only scale a coefficient, and that starts at 0"
        fix = f"policy.init_kl_coeff=0.1 policy.kl_target={policy.kl_target}"
        raise bad_value("policy.kl_target", policy.kl_target, wrong, fix)
    if policy.init_kl_coeff is not None and policy.kl_coef not in (0, policy.init_kl_coeff):
        wrong = f"it is where the coefficient starts, and so is policy.kl_coef={policy.kl_coef}"
        raise bad_value("policy.init_kl_coeff", policy.init_kl_coeff, wrong, "only one of the two")
    if policy.kl_target is None and policy.init_kl_coeff not in (None, policy.kl_coef):
        wrong = "it is where an adapted coefficient starts, and without policy.kl_target none is adapted"
        fix = f"policy.kl_coef={policy.init_kl_coeff:g}"
        raise bad_value("policy.init_kl_coeff", policy.init_kl_coeff, wrong, fix)
    if policy.reward_combination == "apart" and policy.kl_in == "reward" and needs_reference(policy):
        wrong = f"the normalization of {_COMBINATION}=apart would take its coefficient out again"
        raise bad_value("policy.kl_in", "reward", wrong, "policy.kl_in=loss")
    batch = optim_batch_size(cfg)
    if policy.kl_target is not None and policy.kl_horizon < batch:
        wrong = f"it is less than one optimizer batch, {batch} responses"
        raise bad_value("policy.kl_horizon", policy.kl_horizon, wrong, f"policy.kl_horizon={20 * batch}")
    if policy.entropy_target is not None and policy.entropy_coef > policy.entropy_coef_max:
        wrong = f"it is above policy.entropy_coef_max={policy.entropy_coef_max}"
        raise bad_value("policy.entropy_coef", policy.entropy_coef, wrong, "policy.entropy_coef=0.001")


def _check_reference(cfg: Config) -> None:
    ref_model, frequency = cfg.ref_model, cfg.ref_model.refresh_frequency
    if ref_model.refresh_mix < 1 and ref_model.dtype not in ("auto", "float32"):
        wrong = (
            "its digits are too few for the steps of ref_model.refresh_mix, most of which would round to 0"
        )
        raise bad_value("ref_model.dtype", ref_model.dtype, wrong, "ref_model.dtype=float32")
    if frequency > 0 and not needs_reference(cfg.policy):
        wrong = "there is no reference model, because policy.kl_coef is 0"
        fix = f"policy.kl_coef=0.01 ref_model.refresh_frequency={frequency}"
        raise bad_value("ref_model.refresh_frequency", frequency, wrong, fix)


def _check_maxent(cfg: Config) -> None:
    policy = cfg.policy
    maxent = policy.advantage_estimator == "maxent"
    if maxent != (policy.kl_in == "weights") and (maxent or needs_reference(policy)):
        if maxent:
            wrong = f"{_MAXENT} takes the reference into its weights"
            fix = f"policy.kl_in=weights, or {_OTHER_ESTIMATOR} policy.kl_in={policy.kl_in}"
        else:
            wrong = f"only {_MAXENT} has such weights, and it is {policy.advantage_estimator}"
            fix = "policy.kl_in=loss, or policy.advantage_estimator=maxent policy.kl_in=weights"
        raise bad_value("policy.kl_in", policy.kl_in, wrong, fix)
    if not maxent:
        return
    if policy.reward_combination == "apart":
        wrong = f"{_MAXENT} takes one sum of rewards for a response"
        fix = f"{_TOGETHER}, or {_OTHER_ESTIMATOR} {_COMBINATION}=apart"
        raise bad_value(_COMBINATION, "apart", wrong, fix)
    if policy.tau + initial_kl_coef(policy) <= 0:
        wrong = "with policy.kl_coef=0 the best response would take all the weight, divided by 0"
        raise bad_value("policy.tau", policy.tau, wrong, "policy.tau=0.1")
    if policy.q_epsilon * cfg.env.repeats > 1:
        wrong = f"it is more than one divided by env.repeats={cfg.env.repeats}"
        raise bad_value("policy.q_epsilon", policy.q_epsilon, wrong, "policy.q_epsilon=1e-6")


def _check_teacher(cfg: Config) -> None:
    policy = cfg.policy
    if policy.distill_coef == 0:
        if policy.advantage_estimator == "none":
            wrong = "without a teacher nothing would be learned"
            fix = f"{_HAVE_TEACHER}, or policy.advantage_estimator=group_mean"
            raise bad_value("policy.advantage_estimator", "none", wrong, fix)
        return
    coef = f"policy.distill_coef={as_set(policy.distill_coef, 'policy.distill_coef')}"
    if cfg.teacher_model.name is None:
        wrong = f"{coef} needs a teacher"
        fix = "teacher_model.name= and the name of a model on the hub, or the folder of one"
        raise bad_value("teacher_model.name", None, wrong, fix)
    instead = f"with {coef} the teacher takes the place of the reference model"
    check_unset(cfg, "policy", "kl_coef init_kl_coeff kl_target", instead)
    check_unset(cfg, "ref_model", "num_devices devices dtype", f"{instead}, and teacher_model has its keys")
    if policy.advantage_estimator == "maxent":
        wrong = f"{_MAXENT} weighs whole responses, and a teacher judges each token"
        raise bad_value("policy.distill_coef", policy.distill_coef, wrong, _OTHER_ESTIMATOR)
    if policy.constant_groups != "keep":
        wrong = f"with {coef} a group of equal rewards teaches too"
        raise bad_value(
            "policy.constant_groups", policy.constant_groups, wrong, "policy.constant_groups=keep"
        )
    if policy.ratio != "token" and policy.distill_top_k == 0:
        wrong = f"with {coef} each token has an advantage, and needs a ratio, of its own"
        fix = "policy.ratio=token, or policy.distill_top_k=32"
        raise bad_value("policy.ratio", policy.ratio, wrong, fix)
    if (hint := cfg.teacher_model.hint) is not None and "{solution}" not in hint:
        wrong = "it has no {solution}, which the solution of each problem replaces"
        raise bad_value("teacher_model.hint", hint, wrong, "teacher_model.hint='A solution is: {solution}'")
    if hint is not None and has_episodes(cfg):
        wrong = "in episodes the environment or the tools write the prompt"
        raise bad_value("teacher_model.hint", hint, wrong, "teacher_model.hint=null")
    if policy.advantage_estimator == "none" and policy.overlong == "penalise":
        wrong = "with policy.advantage_estimator=none nothing is learned from rewards"
        raise bad_value("policy.overlong", "penalise", wrong, "policy.overlong=keep or policy.overlong=mask")
