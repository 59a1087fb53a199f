"""Checks of the values of a configuration, alone and in combination. Needs no model and no torch.

Some mistakes can only be found in the data or the model, such as a malformed row or a prompt longer
than the context. The code that reads the data or the model checks for them. Every error is a
ConfigError that names the key, its value and a fix.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import re
from collections.abc import Callable, Iterator
from enum import EnumType
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_grpo.config.checks.data import check_data, check_mixture
from torchrl_grpo.config.checks.engine import check_engine_args, check_servers, check_transfer
from torchrl_grpo.config.checks.lora import check_lora
from torchrl_grpo.config.checks.pictures import check_pictures
from torchrl_grpo.config.checks.policy import check_policy
from torchrl_grpo.config.checks.sglang import check_python
from torchrl_grpo.config.checks.unread import check_unread, check_unset
from torchrl_grpo.config.derived import optim_batch_size
from torchrl_grpo.config.engines import reference_engine
from torchrl_grpo.config.keys import bad_value, show
from torchrl_grpo.config.mixture import mixture_parts
from torchrl_grpo.config.schema import keys
from torchrl_grpo.config.values import LOGGERS, ZERO_STAGES, PrefixAttention, Range
from torchrl_grpo.errors import ConfigError

if TYPE_CHECKING:
    from torchrl_grpo.config.schema import (
        Config,
        InferenceModelConfig,
        RefModelConfig,
        TeacherModelConfig,
        TrainModelConfig,
    )

# Limit of W&B.
_TAG_LENGTH = 64


def validate(cfg: Config) -> None:
    """Check every value and every combination of values.

    Args:
        cfg: configuration with valid keys and types.

    Raises:
        ConfigError: a value is invalid; the error names the first one found.
    """
    check_mixture(cfg)
    _check_each(cfg)
    _check_devices(cfg)
    check_data(cfg)
    for part in mixture_parts(cfg):
        try:
            _check_each(part.cfg)
            check_data(part.cfg)
        except ConfigError as error:
            raise ConfigError(f"env.mixture, part {part.name}: {error}") from error
    _check_length(cfg)
    _check_batches(cfg)
    _check_evaluated(cfg)
    check_policy(cfg)
    check_lora(cfg)
    check_pictures(cfg)
    _check_train_model(cfg)
    _check_inference(cfg)
    check_servers(cfg)
    check_transfer(cfg)
    check_engine_args(cfg)
    _check_logging(cfg)
    if cfg.hub.push is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", cfg.hub.push, re.ASCII):
        raise bad_value("hub.push", cfg.hub.push, "it is no name of a repository", "hub.push=ORG/NAME")


def check_installed(cfg: Config) -> None:
    """Check that the packages that a configuration needs are installed, without importing them.

    This check is not part of :func:`validate`, because a configuration may be read on a machine
    other than the one it runs on.

    Raises:
        ConfigError: a setting needs a package that is not installed.
    """
    engine, starts_engine = cfg.inference_model.engine, cfg.inference_model.servers == "auto"
    parallelism, loggers = cfg.train_model.parallelism, cfg.logging.backends
    needed: list[tuple[bool, str | None, str, str]] = [
        (
            starts_engine and not engine.has_own_python,
            engine.package,
            "inference_model.backend",
            reference_engine(),
        ),
        (cfg.train_model.quantization != "none", "bitsandbytes", "train_model.quantization", "none"),
        (cfg.optimizer.name == "adamw_8bit", "bitsandbytes", "optimizer.name", "adamw"),
        (parallelism in ZERO_STAGES, "deepspeed", "train_model.parallelism", "fsdp2"),
        *((True, LOGGERS[name], "logging.backends", "[csv]") for name in loggers),
    ]
    for is_needed, package, key, other in needed:
        if is_needed and package is not None and importlib.util.find_spec(package) is None:
            raise bad_value(key, attrgetter(key)(cfg), f"{package} is not installed", f"{key}={other}")
    if starts_engine and engine.has_own_python:
        check_python(cfg)


def cuda_device_present() -> bool:
    """Return whether the file system of this machine shows an NVIDIA device; does not import torch."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, float):
        yield value


@functools.cache
def _numeric() -> list[tuple[str, Callable[[Config], Any], Range | None]]:
    """Return the keys that may hold numbers, with their readers and ranges.

    They are listed once, because a search for advice checks thousands of configurations.
    """
    words = (bool, str, str | None, list[str], dict[str, str])
    return [
        (key, attrgetter(key), keys().ranges.get(key))
        for key, hint in keys().leaves.items()
        if hint not in words and not isinstance(hint, EnumType)
    ]


def _check_each(cfg: Config) -> None:
    for key, read, bounds in _numeric():
        value = read(cfg)
        if not all(map(math.isfinite, _numbers(value))):
            raise bad_value(key, value, "it must be finite", f"{key}=<a finite number>")
        mistake = None if bounds is None or value is None else bounds.mistake(value)
        if mistake is not None:
            raise bad_value(key, value, mistake, f"{key}={show(keys().defaults[key])}")
    for key in ("model.name", "logging.project"):
        if not attrgetter(key)(cfg).strip():
            raise bad_value(key, "''", "it must not be empty", f"{key}=NAME")
    betas = cfg.optimizer.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        wrong = "it must be two numbers of at least 0 and below 1"
        raise bad_value("optimizer.betas", betas, wrong, "optimizer.betas=[0.9,0.999]")
    check_unread(cfg)


def _check_train_model(cfg: Config) -> None:
    trained = cfg.train_model
    if trained.prefix_attention == PrefixAttention.varlen:
        key, fix = "train_model.prefix_attention", "train_model.prefix_attention=auto"
        if not trained.shared_prefix:
            raise bad_value(
                key, "varlen", "it is for shared prompts, and train_model.shared_prefix is false", fix
            )
        if trained.autocast == "no":
            raise bad_value(key, "varlen", "it computes in 16 bits, and train_model.autocast is no", fix)
    if trained.offload_optimizer and trained.parallelism in ZERO_STAGES:
        wrong = f"train_model.parallelism={trained.parallelism} divides the moments among the ranks"
        fix = "train_model.offload_optimizer=false, or train_model.parallelism=fsdp2 beside it"
        raise bad_value("train_model.offload_optimizer", True, wrong, fix)


def _check_devices(cfg: Config) -> None:
    sections: dict[str, TrainModelConfig | RefModelConfig | TeacherModelConfig | InferenceModelConfig] = {
        "train_model": cfg.train_model,
        "ref_model": cfg.ref_model,
        "teacher_model": cfg.teacher_model,
        "inference_model": cfg.inference_model,
    }
    for name, section in sections.items():
        count, devices = section.num_devices, section.devices
        if count != "auto" and (isinstance(count, str) or count < 1):
            wrong = "it must be auto or a whole number of at least 1"
            raise bad_value(f"{name}.num_devices", count, wrong, f"{name}.num_devices=1")
        if devices is None:
            continue
        key = f"{name}.devices"
        if not devices or min(devices) < 0:
            wrong = "it must be null or a list of device numbers of at least 0"
            raise bad_value(key, devices, wrong, f"{key}=[0]")
        if len(set(devices)) != len(devices):
            once = show(list(dict.fromkeys(devices)))
            raise bad_value(key, devices, "it names a device twice", f"{key}={once}")
        if count not in ("auto", len(devices)):
            wrong = f"it names {len(devices)} devices, and {name}.num_devices is {count}"
            raise bad_value(key, devices, wrong, f"{name}.num_devices={len(devices)}")


def _check_length(cfg: Config) -> None:
    train, round_size = cfg.train, cfg.env.num_envs * cfg.env.repeats
    turns = train.total_dialog_turns
    if (turns is None) == (train.num_epochs is None):
        wrong = "exactly one of train.total_dialog_turns and train.num_epochs says how long a run is"
        fix = "train.num_epochs=1 or train.total_dialog_turns=64000"
        if turns is not None:
            fix = f"train.total_dialog_turns=null train.num_epochs={show(train.num_epochs)}, or "
            fix += f"train.total_dialog_turns={turns} train.num_epochs=null"
        raise bad_value("train.num_epochs", train.num_epochs, wrong, fix)
    if turns is not None and turns % round_size:
        wrong = f"it must be a multiple of one collection round, {_round(cfg)}"
        fix = f"train.total_dialog_turns={max(1, round(turns / round_size)) * round_size}"
        raise bad_value("train.total_dialog_turns", turns, wrong, fix)


def _check_evaluated(cfg: Config) -> None:
    """Check that what reads the held-out value has evaluations to read it from."""
    for name in ("keep_best", "stop_at", "patience"):
        value = attrgetter(name)(cfg.train)
        if value is None or value is False:
            continue
        for key, wrong in (("num_problems", "no problem is held out"), ("frequency", "no step is evaluated")):
            if attrgetter(key)(cfg.eval) == 0:
                good = f"eval.{key}={show(keys().defaults[f'eval.{key}'])}"
                wrong = f"{wrong} with eval.{key}=0"
                raise bad_value(f"train.{name}", value, wrong, f"{good} train.{name}={show(value)}")


def _round(cfg: Config) -> str:
    env = cfg.env
    size = env.num_envs * env.repeats
    return f"{env.num_envs} prompts (env.num_envs) x {env.repeats} samples (env.repeats) = {size}"


def _check_batches(cfg: Config) -> None:
    env, train = cfg.env, cfg.train
    round_size = env.num_envs * env.repeats
    batch = optim_batch_size(cfg)
    if batch % env.repeats or round_size % batch:
        sizes = [str(n * env.repeats) for n in range(1, env.num_envs + 1) if env.num_envs % n == 0]
        wrong = f"it must be a multiple of env.repeats={env.repeats} that divides one round, {_round(cfg)}"
        fix = f"one of {', '.join(sizes)}, or null for the whole round"
        raise bad_value("train.optim_batch_size", batch, wrong, fix)
    steps, groups = train.gradient_accumulation_steps, batch // env.repeats
    key = "train.gradient_accumulation_steps"

    def is_possible(n: int) -> bool:
        return groups % n == 0 or (n % groups == 0 and batch % n == 0)

    if not (1 <= steps <= batch and is_possible(steps)):
        wrong = (
            f"it must divide the {groups} groups of an optimizer batch of {batch} samples, or be that number "
            f"times a divisor of env.repeats={env.repeats}"
        )
        smaller = range(min(max(steps, 1), batch), 0, -1)
        raise bad_value(key, steps, wrong, f"{key}={next(filter(is_possible, smaller))}")
    budget, longest = train.max_tokens_per_microbatch, cfg.inference_model.max_model_len
    key = "train.max_tokens_per_microbatch"
    if budget is not None and budget < longest:
        wrong = f"it is less than one sequence may have, inference_model.max_model_len={longest}"
        raise bad_value(key, budget, wrong, f"{key}={longest}")


def _check_inference(cfg: Config) -> None:
    inference = cfg.inference_model
    if (tokens := inference.max_new_tokens) >= inference.max_model_len:
        wrong = f"it leaves no room for a prompt in inference_model.max_model_len={inference.max_model_len}"
        fix = f"inference_model.max_model_len={tokens + 512}"
        raise bad_value("inference_model.max_new_tokens", tokens, wrong, fix)
    engine = inference.engine
    if inference.sleep and engine.sleeps_on_gpu and not cuda_device_present():
        wrong = f"{engine.program} can sleep only on a CUDA device, and there is none here"
        raise bad_value("inference_model.sleep", True, wrong, "inference_model.sleep=false")
    for key in ("inference_model.temperature", "eval.temperature"):
        value, least = attrgetter(key)(cfg), engine.least_temperature
        if value < least:
            wrong = f"inference_model.backend={inference.backend} samples at {least} or more"
            raise bad_value(key, value, wrong, f"{key}={least}")


def _check_logging(cfg: Config) -> None:
    backends = cfg.logging.backends
    for key in ("logging.entity", "logging.group"):
        value = attrgetter(key)(cfg)
        if value is not None and not value.strip():
            raise bad_value(key, "''", "it must not be empty", f"{key}=NAME or {key}=null")
    if not all(0 < len(tag.strip()) <= _TAG_LENGTH for tag in cfg.logging.tags):
        wrong = f"a tag has 1 to {_TAG_LENGTH} characters"
        raise bad_value("logging.tags", cfg.logging.tags, wrong, "logging.tags=[baseline], for example")
    if "wandb" not in backends:
        wrong = "only W&B takes it, and wandb is not among logging.backends"
        also = f", or logging.backends={show([*backends, 'wandb'])}"
        check_unset(cfg, "logging", "entity group tags", wrong, also)
    for name in backends:
        if name not in LOGGERS:
            wrong = f"{show(name)} is not one of {', '.join(LOGGERS)}"
            raise bad_value("logging.backends", backends, wrong, "logging.backends=[csv], for example")
    if len(set(backends)) != len(backends):
        once = show(list(dict.fromkeys(backends)))
        raise bad_value("logging.backends", backends, "it names a logger twice", f"logging.backends={once}")
