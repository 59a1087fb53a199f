"""Checks that depend on the script, on when weights are published, or on the number of steps."""

from __future__ import annotations

from operator import attrgetter

from torchrl_grpo.config.allocation import shares_devices
from torchrl_grpo.config.checks.unread import check_unset
from torchrl_grpo.config.derived import (
    num_devices,
    optim_batch_size,
    passes,
    rounds,
    steps_per_round,
    total_turns,
)
from torchrl_grpo.config.keys import bad_value, show
from torchrl_grpo.config.schema import Config, InferenceModelConfig, TrainModelConfig
from torchrl_grpo.config.values import TrainMethod
from torchrl_grpo.errors import ConfigError

# train.total_dialog_turns of the configurations that the commands take by default.
DEFAULT_TURNS = (64_000, 14_944)
# Passes over the problems from which on a default length is longer than anybody wants.
_MANY_PASSES = 20


def check_sync(cfg: Config) -> None:
    """Check the requirements of ``grpo.py`` that :func:`~torchrl_grpo.config.checks.validate` does not cover.

    Raises:
        ConfigError: there are more training ranks than groups in an optimizer batch.
    """
    _check_ranks(cfg)


def check_takes_turns(cfg: Config) -> None:
    """Check that nothing is set for engines that generate while the trainer trains.

    An age of 1 is the default, and one of 0 is what a script does that takes turns.

    Raises:
        ConfigError: a key is set that only ``grpo-async.py`` reads.
    """
    wrong = "only grpo-async.py generates ahead of the trainer"
    script = "" if cfg.train.method == "sft" else ", or call grpo-async.py"
    if (age := cfg.collector.max_policy_age) > 1:
        raise bad_value("collector.max_policy_age", age, wrong, f"collector.max_policy_age=0{script}")
    if cfg.collector.partial_rollout:
        raise bad_value("collector.partial_rollout", True, wrong, f"collector.partial_rollout=false{script}")


def check_method(cfg: Config, method: TrainMethod) -> None:
    """Check that a configuration is one for the script that was called.

    Args:
        cfg: validated configuration.
        method: what the script learns from.

    Raises:
        ConfigError: it is for another script, or keys contradict supervised fine-tuning.
    """
    if cfg.train.method != method:
        wrong = f"this script learns from {'rewards' if method == 'grpo' else 'solutions'}"
        fix = "train.method=grpo, or call sft.py" if method == "grpo" else "+method=sft, or call grpo.py"
        raise bad_value("train.method", cfg.train.method, wrong, fix)
    if method == "sft":
        _check_sft(cfg)


def _check_sft(cfg: Config) -> None:
    sft = "with train.method=sft"
    for key, needed, wrong in (
        ("env.repeats", 1, "a problem has one solution"),
        ("policy.surrogate", "log_likelihood", "a solution was not sampled, so it has no ratio"),
        ("policy.advantage_estimator", "reward", "a solution has no baseline"),
    ):
        if (value := attrgetter(key)(cfg)) != needed:
            raise bad_value(key, value, f"{wrong} {sft}", f"{key}={needed}")
    for section, names, wrong in (
        ("policy", "reward_shift reward_scale reward_clip constant_groups", "solutions have no rewards"),
        ("policy", "kl_inference_coef correction distill_coef", "a solution was not sampled"),
        ("inference_model", "temperature", "nothing is sampled in training"),
        ("env", "sampling", "solutions have no pass rate"),
        ("env", "environment tools", "solutions have one turn"),
    ):
        check_unset(cfg, section, names, f"{wrong} {sft}")
    for key, refused, fix in (
        ("policy.overlong", "penalise", "policy.overlong=keep or policy.overlong=mask"),
        ("policy.kl_in", "reward", "policy.kl_in=loss"),
    ):
        if attrgetter(key)(cfg) == refused:
            raise bad_value(key, refused, f"solutions have no rewards {sft}", fix)


def check_in_turn(cfg: Config) -> None:
    """Check what ``grpo.py`` requires if its engines have processes of their own: a policy age of 0, for one.

    Raises:
        ConfigError: keys contradict each other, or there are more workers than groups in a round.
    """
    if cfg.train.method == "grpo":
        _check_rounds(cfg, 0, "and engines in processes of their own allow none (docs/devices.md)")
    _check_workers(cfg)


def check_async(cfg: Config) -> None:
    """Check what ``grpo-async.py`` requires beyond :func:`~torchrl_grpo.config.checks.validate`.

    Raises:
        ConfigError: keys contradict each other, or there are more ranks or workers than groups.
    """
    _check_ranks(cfg)
    if cfg.allocation_mode is not None and shares_devices(cfg.allocation_mode):
        wrong = (
            "workers of grpo-async.py generate while the trainer trains, so they need devices of their own"
        )
        raise bad_value(
            "allocation_mode", cfg.allocation_mode, wrong, "allocation_mode=vllm:d4+fsdp:d4, or call grpo.py"
        )
    age = cfg.collector.max_policy_age
    _check_rounds(cfg, age, f"and collector.max_policy_age={age} allows less")
    way = cfg.inference_model.weight_transfer
    if way in ("cuda_ipc", "nccl"):
        # A server or worker that is started again gets the trainer's current weights.
        _check_rounds(cfg, 0, f"and inference_model.weight_transfer={way} allows none")
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
    """Return whether the engine may sleep while the trainer trains.

    An engine loses its weights while it sleeps, so it must get new weights before each round.
    """
    return (
        cfg.train.weight_update_frequency is None
        or not steps_per_round(cfg) % cfg.train.weight_update_frequency
    )


def check_sleep(cfg: Config) -> None:
    """Check the requirements of an engine that sleeps, whether the user or the planner chose ``sleep``.

    Raises:
        ConfigError: the engine would have to generate without weights.
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


def length_warnings(cfg: Config, problems: int | None = None) -> list[str]:
    """Return a sentence for each schedule that the run is too short for, and one if its data are too few.

    They are no errors, because a short trial keeps the schedules of the long run that it tries out.

    Args:
        cfg: configuration from :func:`~torchrl_grpo.config.derived.with_total_turns`.
        problems: number of problems to train on; None if unknown.
    """
    per_round, drawn = steps_per_round(cfg), rounds(cfg) * cfg.env.num_envs
    total = rounds(cfg) * per_round
    run = f"the run has {total} optimizer step{'' if total == 1 else 's'}"
    entries: list[tuple[str, object, str, str]] = []

    def turns(steps: int) -> str:
        needed = -(-steps // per_round) * cfg.env.num_envs * cfg.env.repeats
        return f"train.total_dialog_turns={needed}"

    warmup, lr, decays = cfg.optimizer.warmup_steps, cfg.optimizer.lr, cfg.optimizer.schedule != "constant"
    if warmup >= total:
        highest = f"the learning rate ends at {lr * total / (warmup + 1):.3g}"
        wrong = f"{run}, so {highest} and never reaches optimizer.lr={lr:g}"
        good = f"optimizer.warmup_steps={total // 10} or {turns(warmup + 1 + decays)}"
        entries.append(("optimizer.warmup_steps", warmup, wrong, good))
    elif decays and warmup == total - 1 > 0:
        wrong = f"{run}, and optimizer.warmup_steps={warmup}, so the learning rate never falls"
        good = f"optimizer.warmup_steps={total // 10} or {turns(warmup + 2)}"
        entries.append(("optimizer.schedule", cfg.optimizer.schedule, wrong, good))
    refresh = cfg.ref_model.refresh_frequency
    if refresh > total - per_round:
        wrong = f"{run}, so no round is scored with a refreshed reference"
        good = f"ref_model.refresh_frequency={max(1, total // 10)} or {turns(refresh + per_round)}"
        entries.append(("ref_model.refresh_frequency", refresh, wrong, good))
    publish = cfg.train.weight_update_frequency
    if publish is not None and publish > total - per_round > 0 and cfg.train.method == TrainMethod.grpo:
        wrong = f"{run}, so every round is generated with the first weights"
        good = f"train.weight_update_frequency={per_round} or {turns(publish + per_round)}"
        entries.append(("train.weight_update_frequency", publish, wrong, good))
    horizon, responses = cfg.policy.kl_horizon, total_turns(cfg) * cfg.train.epochs
    if cfg.policy.kl_target is not None and horizon > responses:
        wrong = (
            f"the run trains on {responses} responses, so policy.kl_target={cfg.policy.kl_target:g} changes "
            "the coefficient by less than about a fifth"
        )
        good = f"policy.kl_horizon={max(optim_batch_size(cfg), responses // 10)}"
        entries.append(("policy.kl_horizon", horizon, wrong, good))
    if cfg.env.order_by is not None and problems is not None and drawn < problems:
        wrong = f"the run draws {drawn} of {problems} problems, so it never reaches the last of them"
        good = "train.total_dialog_turns=null train.num_epochs=1"
        entries.append(("env.order_by", cfg.env.order_by, wrong, good))
    is_default = total_turns(cfg) in DEFAULT_TURNS
    if is_default and problems and passes(cfg, problems) > _MANY_PASSES:
        wrong = (
            f"this default makes {total} optimizer step{'' if total == 1 else 's'}, which pass over the "
            f"{problems} problems {passes(cfg, problems):.3g} times"
        )
        good = "train.num_epochs=8 or a smaller train.total_dialog_turns"
        entries.append(("train.total_dialog_turns", total_turns(cfg), wrong, good))
    return [str(bad_value(*entry)) for entry in entries]


def _check_rounds(cfg: Config, age: int, allowed: str) -> None:
    """Check that weights are published in step with rounds, and often enough for the policy age ``age``."""
    steps = steps_per_round(cfg)
    frequency = cfg.train.weight_update_frequency or steps
    # Published weights serve rounds until the next publication. This is their age, in rounds, when the last
    # of these rounds begins.
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
            f"it must divide a collection round of {steps} optimizer steps, or be a multiple of it",
            f"train.weight_update_frequency={steps}",
        )


def _check_workers(cfg: Config) -> None:
    inference, groups = cfg.inference_model, cfg.env.num_envs
    wrong = f"a round has only env.num_envs={groups} groups, and a group is not divided"
    if isinstance(inference.servers, list):
        if len(inference.servers) > groups:
            fix = f"inference_model.servers={show(inference.servers[:groups])}"
            raise bad_value("inference_model.servers", inference.servers, wrong, fix)
        return
    size = inference.tensor_parallel_size * inference.pipeline_parallel_size
    if num_devices(inference) > groups * size:
        raise _too_many("inference_model", inference, wrong, groups * size)


def _check_ranks(cfg: Config) -> None:
    """Refuse more training ranks than an optimizer batch has groups."""
    ranks = num_devices(cfg.train_model)
    groups = optim_batch_size(cfg) // cfg.env.repeats
    if ranks > groups:
        wrong = f"an optimizer batch has only {groups} groups, and a group is trained on one rank"
        raise _too_many("train_model", cfg.train_model, wrong, groups)


def _too_many(
    name: str, section: TrainModelConfig | InferenceModelConfig, wrong: str, most: int
) -> ConfigError:
    """Build the error for a role with too many devices; it names the key that requested them."""
    if section.devices is None:
        return bad_value(f"{name}.num_devices", num_devices(section), wrong, f"{name}.num_devices={most}")
    fewer = section.devices[:most]
    good = f"{name}.devices={show(fewer)}"
    if section.num_devices != "auto":
        good += f" {name}.num_devices={most}"
    return bad_value(f"{name}.devices", section.devices, wrong, good)
