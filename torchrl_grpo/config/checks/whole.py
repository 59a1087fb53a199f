"""Checks of the values of a configuration, alone and in combination. Needs no model and no torch.

Some mistakes can only be found in the data or the model, such as a malformed row or a prompt longer
than the context. The code that reads the data or the model checks for them. Every error is a
ConfigError that names the key, its value and a fix.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_grpo.config.checks.data import check_data
from torchrl_grpo.config.checks.engine import check_engine_args, check_servers, check_transfer
from torchrl_grpo.config.checks.lora import check_lora
from torchrl_grpo.config.checks.policy import check_policy
from torchrl_grpo.config.checks.sglang import check_python
from torchrl_grpo.config.derived import optim_batch_size
from torchrl_grpo.config.keys import bad_value, show
from torchrl_grpo.config.mixture import mixture_parts
from torchrl_grpo.config.schema import keys
from torchrl_grpo.config.values import (
    VLLM_BACKENDS,
    VLLM_LEAST_TEMPERATURE,
    ZERO_STAGES,
    Backend,
    PrefixAttention,
)
from torchrl_grpo.errors import ConfigError

if TYPE_CHECKING:
    from torchrl_grpo.config.schema import (
        Config,
        InferenceModelConfig,
        RefModelConfig,
        TrainModelConfig,
    )

# Limit of W&B.
_TAG_LENGTH = 64
_LOGGER_PACKAGES = {"csv": None, "tensorboard": "tensorboard", "wandb": "wandb"}


def validate(cfg: Config) -> None:
    """Check every value and every combination of values.

    Args:
        cfg: configuration with valid keys and types.

    Raises:
        ConfigError: a value is invalid; the error names the first one found.
    """
    _check_each(cfg)
    for part in mixture_parts(cfg):
        try:
            _check_each(part.cfg)
        except ConfigError as error:
            raise ConfigError(f"env.mixture, part {part.name}: {error}") from error
    _check_devices(cfg)
    check_data(cfg)
    _check_length(cfg)
    _check_batches(cfg)
    check_policy(cfg)
    check_lora(cfg)
    _check_attention(cfg)
    _check_offload(cfg)
    _check_inference(cfg)
    check_servers(cfg)
    check_transfer(cfg)
    check_engine_args(cfg)
    _check_logging(cfg)


def check_installed(cfg: Config) -> None:
    """Check that the packages that a configuration needs are installed, without importing them.

    This check is not part of :func:`validate`, because a configuration may be read on a machine
    other than the one it runs on.

    Raises:
        ConfigError: a setting needs a package that is not installed.
    """
    inference = cfg.inference_model
    starts_vllm = inference.backend in VLLM_BACKENDS and inference.servers == "auto"
    if starts_vllm and importlib.util.find_spec("vllm") is None:
        good = "inference_model.backend=transformers"
        raise bad_value("inference_model.backend", inference.backend, "vllm is not installed", good)
    if inference.backend == Backend.sglang_server and inference.servers == "auto":
        check_python(cfg)
    quantization = cfg.train_model.quantization
    if quantization != "none" and importlib.util.find_spec("bitsandbytes") is None:
        wrong = "bitsandbytes is not installed"
        raise bad_value("train_model.quantization", quantization, wrong, "train_model.quantization=none")
    parallelism = cfg.train_model.parallelism
    if parallelism in ZERO_STAGES and importlib.util.find_spec("deepspeed") is None:
        wrong = "deepspeed is not installed"
        raise bad_value("train_model.parallelism", parallelism, wrong, "train_model.parallelism=fsdp2")
    for name in cfg.logging.backends:
        package = _LOGGER_PACKAGES[name]
        if package is not None and importlib.util.find_spec(package) is None:
            wrong = f"{package} is not installed"
            raise bad_value("logging.backends", cfg.logging.backends, wrong, "logging.backends=[csv]")


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


def _check_each(cfg: Config) -> None:
    for key, default in keys().defaults.items():
        value = attrgetter(key)(cfg)
        if any(not math.isfinite(number) for number in _numbers(value)):
            raise bad_value(key, value, "must be finite", f"{key}=<a finite number>")
        bounds = keys().ranges.get(key)
        mistake = None if bounds is None or value is None else bounds.mistake(value)
        if mistake is not None:
            raise bad_value(key, value, mistake, f"{key}={show(default)}")
    for key in ("model.name", "logging.project"):
        if not attrgetter(key)(cfg).strip():
            raise bad_value(key, "''", "must not be empty", f"{key}=NAME")
    if len(cfg.optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in cfg.optimizer.betas):
        raise bad_value(
            "optimizer.betas",
            cfg.optimizer.betas,
            "must be two numbers of at least 0 and below 1",
            "optimizer.betas=[0.9,0.999]",
        )


def _check_attention(cfg: Config) -> None:
    attention = cfg.train_model.attn_implementation
    if attention != "auto" and cfg.train_model.shared_prefix:
        wrong = "with train_model.shared_prefix=true the attention of a group is computed in a way of its own"
        good = f"train_model.shared_prefix=false train_model.attn_implementation={attention}"
        raise bad_value("train_model.attn_implementation", attention, wrong, good)
    if cfg.train_model.prefix_attention == PrefixAttention.varlen:
        fix = "train_model.prefix_attention=auto"
        if not cfg.train_model.shared_prefix:
            wrong = "is for shared prompts, and train_model.shared_prefix is false"
            raise bad_value("train_model.prefix_attention", "varlen", wrong, fix)
        if cfg.train_model.autocast == "no":
            wrong = "computes in 16 bits, and train_model.autocast is no"
            raise bad_value("train_model.prefix_attention", "varlen", wrong, fix)


def _check_offload(cfg: Config) -> None:
    if cfg.train_model.offload_optimizer and cfg.train_model.parallelism in ZERO_STAGES:
        wrong = f"train_model.parallelism={cfg.train_model.parallelism} divides the moments among the ranks"
        good = "train_model.offload_optimizer=false, or train_model.parallelism=fsdp2 and the same,"
        raise bad_value("train_model.offload_optimizer", True, wrong, good)


def _check_devices(cfg: Config) -> None:
    sections: dict[str, TrainModelConfig | RefModelConfig | InferenceModelConfig] = {
        "train_model": cfg.train_model,
        "ref_model": cfg.ref_model,
        "inference_model": cfg.inference_model,
    }
    for name, section in sections.items():
        count, devices = section.num_devices, section.devices
        if isinstance(count, str) and count != "auto":
            raise bad_value(
                f"{name}.num_devices", count, "must be a whole number or auto", f"{name}.num_devices=1"
            )
        if isinstance(count, int) and count < 1:
            raise bad_value(f"{name}.num_devices", count, "must be at least 1", f"{name}.num_devices=1")
        if devices is None:
            continue
        if not devices or min(devices) < 0:
            wrong = "must be null or a list of device numbers, each at least 0"
            raise bad_value(f"{name}.devices", devices, wrong, f"{name}.devices=[0]")
        if len(set(devices)) != len(devices):
            once = list(dict.fromkeys(devices))
            raise bad_value(
                f"{name}.devices", devices, "names a device twice", f"{name}.devices={show(once)}"
            )
        if isinstance(count, int) and count != len(devices):
            wrong = f"{len(devices)} named, and {name}.num_devices={count}"
            raise bad_value(f"{name}.devices", devices, wrong, f"{name}.num_devices={len(devices)}")


def _check_length(cfg: Config) -> None:
    train, round_size = cfg.train, cfg.env.num_envs * cfg.env.repeats
    turns = train.total_dialog_turns
    if (turns is None) == (train.num_epochs is None):
        wrong = "one of train.total_dialog_turns and train.num_epochs says how long a run is"
        good = "train.num_epochs=1 or train.total_dialog_turns=64000"
        if turns is not None:
            good = f"train.total_dialog_turns=null train.num_epochs={show(train.num_epochs)}, or "
            good += f"train.total_dialog_turns={turns} train.num_epochs=null"
        raise bad_value("train.num_epochs", train.num_epochs, wrong, good)
    if turns is not None and turns % round_size:
        rounds = max(1, round(turns / round_size))
        raise bad_value(
            "train.total_dialog_turns",
            turns,
            f"must be a multiple of one collection round, {_round(cfg)}",
            f"train.total_dialog_turns={rounds * round_size}",
        )


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
        raise bad_value(
            "train.optim_batch_size",
            batch,
            f"must be a multiple of env.repeats={env.repeats} and divide one collection round, {_round(cfg)}",
            f"one of {', '.join(sizes)}, or null for the whole round,",
        )
    steps, groups = train.gradient_accumulation_steps, batch // env.repeats
    good = [n for n in range(1, batch + 1) if groups % n == 0 or (n % groups == 0 and batch % n == 0)]
    if steps not in good:
        raise bad_value(
            "train.gradient_accumulation_steps",
            steps,
            f"must divide the {groups} groups of an optimizer batch of {batch} samples, or be that number "
            f"times a divisor of env.repeats={env.repeats}",
            f"train.gradient_accumulation_steps={max(n for n in good if n <= max(steps, 1))}",
        )
    budget, longest = train.max_tokens_per_microbatch, cfg.inference_model.max_model_len
    if budget is not None and budget < longest:
        raise bad_value(
            "train.max_tokens_per_microbatch",
            budget,
            f"is less than one sequence may have, inference_model.max_model_len={longest}",
            f"train.max_tokens_per_microbatch={longest}",
        )


def _check_inference(cfg: Config) -> None:
    inference = cfg.inference_model
    if inference.max_new_tokens >= inference.max_model_len:
        raise bad_value(
            "inference_model.max_new_tokens",
            inference.max_new_tokens,
            f"leaves no room for a prompt in inference_model.max_model_len={inference.max_model_len}",
            f"inference_model.max_model_len={inference.max_new_tokens + 512}",
        )
    if inference.sleep and inference.backend in VLLM_BACKENDS and not cuda_device_present():
        wrong = "vLLM can sleep only on a CUDA device, and there is none here"
        raise bad_value("inference_model.sleep", True, wrong, "inference_model.sleep=false")
    for key in ("inference_model.temperature", "eval.temperature"):
        value = attrgetter(key)(cfg)
        if inference.backend in VLLM_BACKENDS and value < VLLM_LEAST_TEMPERATURE:
            least = VLLM_LEAST_TEMPERATURE
            backend = f"inference_model.backend={inference.backend}"
            wrong = f"must be at least {least} with {backend}, which samples at no less"
            raise bad_value(key, value, wrong, f"{key}={least}")


def _check_logging(cfg: Config) -> None:
    backends = cfg.logging.backends
    for key, value in (("logging.entity", cfg.logging.entity), ("logging.group", cfg.logging.group)):
        if value is not None and not value.strip():
            raise bad_value(key, "''", "must not be empty", f"{key}=NAME or {key}=null")
    if not all(0 < len(tag.strip()) <= _TAG_LENGTH for tag in cfg.logging.tags):
        wrong = f"a tag has 1 to {_TAG_LENGTH} characters"
        raise bad_value("logging.tags", cfg.logging.tags, wrong, "for example logging.tags=[baseline]")
    if "wandb" not in backends:
        for key, given in (
            ("logging.entity", cfg.logging.entity),
            ("logging.group", cfg.logging.group),
            ("logging.tags", cfg.logging.tags),
        ):
            if given:
                wrong = "W&B alone takes it, and it is not among logging.backends"
                raise bad_value(key, given, wrong, f"logging.backends={show([*backends, 'wandb'])}")
    for name in backends:
        if name not in _LOGGER_PACKAGES:
            wrong = f"{show(name)} is not one of {', '.join(_LOGGER_PACKAGES)}"
            raise bad_value("logging.backends", backends, wrong, "for example logging.backends=[csv]")
    if len(set(backends)) != len(backends):
        once = list(dict.fromkeys(backends))
        raise bad_value("logging.backends", backends, "names one twice", f"logging.backends={show(once)}")
