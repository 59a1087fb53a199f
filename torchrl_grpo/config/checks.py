"""Checks of the values of a configuration, alone and in combination. Needs no model and no torch.

Some mistakes can only be found in the data or the model, such as a malformed row or a prompt longer
than the context. The code that reads the data or the model checks for them. Every error is a
ConfigError that names the key, its value and a fix.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import math
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_grpo.config.checks_engine import check_engine_args
from torchrl_grpo.config.checks_lora import check_lora
from torchrl_grpo.config.checks_policy import check_policy
from torchrl_grpo.config.derived import has_episodes, optim_batch_size
from torchrl_grpo.config.keys import bad_value, show
from torchrl_grpo.config.mixture import mixture_parts
from torchrl_grpo.config.values import (
    ABOVE_ZERO,
    AT_LEAST,
    AT_MOST,
    DATASETS,
    ENVIRONMENTS,
    REWARD_DATASETS,
    TOOLS,
    VLLM_LEAST_TEMPERATURE,
    ZERO_STAGES,
    dataset_kind,
)
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.runtime import user_code

if TYPE_CHECKING:
    from torchrl_grpo.config.schema import (
        Config,
        EnvConfig,
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
    _check_devices(cfg)
    _check_mixture(cfg)
    _check_task(cfg)
    _check_episodes(cfg)
    _check_sampling(cfg)
    _check_rewards(cfg)
    _check_length(cfg)
    _check_batches(cfg)
    check_policy(cfg)
    check_lora(cfg)
    _check_attention(cfg)
    _check_inference(cfg)
    check_engine_args(cfg)
    _check_logging(cfg)


def check_installed(cfg: Config) -> None:
    """Check that the packages that a configuration needs are installed, without importing them.

    This check is not part of :func:`validate`, because a configuration may be read on a machine
    other than the one it runs on.

    Raises:
        ConfigError: a setting needs a package that is not installed.
    """
    if cfg.inference_model.backend == "vllm" and importlib.util.find_spec("vllm") is None:
        raise bad_value(
            "inference_model.backend", "vllm", "vllm is not installed", "inference_model.backend=transformers"
        )
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


def _leaves(section: object, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in vars(section).items():
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _check_each(cfg: Config) -> None:
    for key, value in _leaves(cfg, ""):
        if any(not math.isfinite(number) for number in _numbers(value)):
            raise bad_value(key, value, "must be finite", f"{key}=<a finite number>")
    for key, (smallest, good) in AT_LEAST.items():
        value = attrgetter(key)(cfg)
        if value is not None and value < smallest:
            why = " (a group of one has no advantage)" if key == "env.repeats" else ""
            raise bad_value(key, value, f"must be at least {smallest}{why}", f"{key}={good}")
    for key, good in ABOVE_ZERO.items():
        value = attrgetter(key)(cfg)
        if value is not None and value <= 0:
            raise bad_value(key, value, "must be greater than 0", f"{key}={good}")
    for key, (largest, good) in AT_MOST.items():
        value = attrgetter(key)(cfg)
        if value is not None and value > largest:
            raise bad_value(key, value, f"must be at most {largest}", f"{key}={good}")
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


def _check_mixture(cfg: Config) -> None:
    parts = mixture_parts(cfg)
    if not parts:
        return
    default = type(cfg.env)()
    for name in ("task", "task_args", "data_path", "eval_data_path", "hub_name", "fields"):
        value = getattr(cfg.env, name)
        if value != getattr(default, name):
            wrong = "with env.mixture each part has its own data set"
            raise bad_value(
                f"env.{name}", value, wrong, f"it in the parts that need it, and env.{name}=null or {{}}"
            )
    for name in ("weights", "functions", "args"):
        value = getattr(cfg.reward, name)
        if value:
            wrong = "with env.mixture each part has its own rewards"
            raise bad_value(
                f"reward.{name}", value, wrong, f"reward: {{{name}: ...}} in the parts, and nothing here"
            )
    if cfg.eval.reward is not None:
        wrong = "with env.mixture each part is graded by its own reward"
        raise bad_value(
            "eval.reward", cfg.eval.reward, wrong, "eval_reward in the parts, and eval.reward=null"
        )
    if cfg.policy.reward_combination == "apart":
        wrong = "the parts of env.mixture have different rewards, of which no group has all"
        raise bad_value("policy.reward_combination", "apart", wrong, "policy.reward_combination=together")
    for part in parts:
        try:
            _check_task(part.cfg)
            _check_episodes(part.cfg)
            _check_rewards(part.cfg)
        except ConfigError as error:
            raise ConfigError(f"env.mixture, part {part.name}: {error}") from error


def _check_dataset(env: EnvConfig) -> None:
    if env.dataset in DATASETS or user_code.parse(env.dataset) is not None:
        return
    close = difflib.get_close_matches(env.dataset, DATASETS, n=1)
    good = f"env.dataset={close[0]}" if close else "env.dataset=jsonl, or FILE.py:FUNCTION of your own,"
    wrong = f"must be one of {', '.join(DATASETS)}, or name a function of your own"
    raise bad_value("env.dataset", env.dataset, wrong, good)


def _check_episodes(cfg: Config) -> None:
    env = cfg.env
    named = [("env.environment", env.environment, ENVIRONMENTS, "CLASS")]
    named += [("env.tools", tool, TOOLS, "FUNCTION") for tool in env.tools]
    for key, name, built_in, kind in named:
        if name is None or name in built_in or user_code.parse(name) is not None:
            continue
        close = difflib.get_close_matches(name, built_in, n=1)
        wrong = f"{show(name)} is none of {', '.join(built_in)}, and names no {kind.lower()} of your own"
        value = env.tools if key == "env.tools" else name
        good = close[0] if close else f"FILE.py:{kind}"
        raise bad_value(key, value, wrong, f"{key}=[{good}]" if key == "env.tools" else f"{key}={good}")
    if len(set(env.tools)) != len(env.tools):
        once = list(dict.fromkeys(env.tools))
        raise bad_value("env.tools", env.tools, "names a tool twice", f"env.tools={show(once)}")
    if env.environment_args and env.environment is None:
        wrong = "there is no environment that takes them"
        raise bad_value(
            "env.environment_args", env.environment_args, wrong, "env.environment=FILE.py:CLASS too,"
        )
    if not has_episodes(cfg):
        return
    key = "env.environment" if env.environment is not None else "env.tools"
    value = env.environment if env.environment is not None else env.tools
    if env.dataset == "reasoning_gym":
        wrong = "its problems are generated when they are drawn, and an episode's prompt is made before"
        raise bad_value(
            "env.dataset", env.dataset, wrong, "another data set, or null and [] for environment and tools,"
        )
    if cfg.collector.partial_rollout:
        wrong = f"an episode stays with the worker that has its environment, and {key}={show(value)} is set"
        raise bad_value("collector.partial_rollout", True, wrong, "collector.partial_rollout=false")
    if env.overlong_prompts in ("truncate_left", "truncate_right", "truncate_middle"):
        wrong = f"cutting a question would change the problem of {key}={show(value)}"
        raise bad_value("env.overlong_prompts", env.overlong_prompts, wrong, "env.overlong_prompts=drop")


def _check_sampling(cfg: Config) -> None:
    env, default = cfg.env, type(cfg.env)()
    for name in ("pass_rate_bands", "pass_rate_weights", "unseen_weight"):
        value = getattr(env, name)
        if env.sampling == "uniform" and value != getattr(default, name):
            wrong = "env.sampling=uniform reads no pass rates"
            raise bad_value(f"env.{name}", value, wrong, "env.sampling=pass_rate too,")
    bands, weights = env.pass_rate_bands, env.pass_rate_weights
    if sorted(set(bands)) != bands or not all(0 <= one <= 1 for one in bands):
        wrong = "must be numbers from 0 to 1 in increasing order"
        raise bad_value("env.pass_rate_bands", bands, wrong, "env.pass_rate_bands=[0.1,0.9]")
    if len(weights) != len(bands) + 1 or min(weights) < 0 or max(weights) <= 0:
        wrong = f"must be {len(bands) + 1} numbers, one for each band, of at least 0 and not all 0"
        good = f"env.pass_rate_weights={show([1.0] * (len(bands) + 1))}"
        raise bad_value("env.pass_rate_weights", weights, wrong, good)
    if env.sampling == "pass_rate" and env.mixture:
        wrong = "the shares of env.mixture are fixed"
        raise bad_value("env.sampling", env.sampling, wrong, "env.sampling=uniform")
    if env.sampling == "pass_rate" and cfg.train.num_epochs is not None:
        wrong = "env.sampling=pass_rate draws with replacement and has no epochs"
        raise bad_value(
            "train.num_epochs", cfg.train.num_epochs, wrong, "train.total_dialog_turns=N and null"
        )
    if env.order_by is None:
        return
    if env.shuffle or env.sampling != "uniform":
        wrong = "an order needs env.shuffle=false and env.sampling=uniform"
        raise bad_value("env.order_by", env.order_by, wrong, "env.shuffle=false too,")
    if env.dataset == "reasoning_gym" or env.mixture:
        wrong = "generated problems have no columns, and a mixture has an order of its own"
        raise bad_value("env.order_by", env.order_by, wrong, "env.order_by=null")


def _check_task(cfg: Config) -> None:
    env = cfg.env
    _check_dataset(env)
    own = user_code.parse(env.dataset) is not None
    generated = env.dataset == "reasoning_gym"
    if generated and env.task is None:
        wrong = "dataset reasoning_gym needs the name of a task"
        raise bad_value("env.task", env.task, wrong, "for example env.task=chain_sum")
    if not generated and env.task is not None:
        wrong = f"dataset {env.dataset} has no tasks, only reasoning_gym has"
        whole = f"env={env.dataset} (the whole group), env.task=null or env.dataset=reasoning_gym"
        raise bad_value("env.task", env.task, wrong, whole)
    if not generated and not own and env.task_args:
        wrong = f"dataset {env.dataset} has no tasks, only reasoning_gym has"
        whole = f"env={env.dataset} (the whole group) or env.dataset=reasoning_gym"
        raise bad_value("env.task_args", env.task_args, wrong, whole)
    for key, path in (("env.data_path", env.data_path), ("env.eval_data_path", env.eval_data_path)):
        if path is None:
            continue
        if generated or own:
            raise bad_value(key, path, f"dataset {env.dataset} reads no file", f"{key}=null")
        if not path.strip() or not Path(path).exists():
            wrong = f"there is no such file or folder below {Path.cwd()}"
            if Path(path).is_absolute():
                wrong = "there is no such file or folder"
            raise bad_value(key, path, wrong, f"{key}=<a path that exists>")
    _check_jsonl(cfg)
    for key, hub in (("env.hub_name", env.hub_name), ("env.hub_subset", env.hub_subset)):
        if (generated or own) and hub is not None:
            raise bad_value(key, hub, f"dataset {env.dataset} reads no hub", f"{key}=null")
    for key, split in (("env.train_split", env.train_split), ("env.eval_split", env.eval_split)):
        if split is None:
            continue
        if generated or own:
            raise bad_value(key, split, f"dataset {env.dataset} has no splits of a file", f"{key}=null")
        if not split.strip():
            raise bad_value(key, "''", "must not be empty", f"{key}=NAME or {key}=null")
    if env.train_split is not None and env.dataset == "ifeval":
        wrong = "the benchmark's rows are those of env.eval_split, and training prompts are composed"
        raise bad_value("env.train_split", env.train_split, wrong, "env.train_split=null")
    if env.overlong_prompts == "drop" and generated:
        wrong = "problems of reasoning_gym are generated when they are drawn, not known before"
        good = "env.overlong_prompts=error or truncate_right"
        raise bad_value("env.overlong_prompts", env.overlong_prompts, wrong, good)
    if env.train_on_ifeval and env.dataset != "ifeval":
        wrong = f"means nothing for dataset {env.dataset}"
        raise bad_value("env.train_on_ifeval", True, wrong, "env.train_on_ifeval=false or env.dataset=ifeval")
    if "{question}" not in env.prompt_template:
        wrong = "does not say where the question goes"
        good = "for example env.prompt_template='{question}'"
        raise bad_value("env.prompt_template", env.prompt_template, wrong, good)


def _check_jsonl(cfg: Config) -> None:
    env = cfg.env
    good = "env.fields={question:COLUMN,answer:COLUMN}"
    if dataset_kind(env.dataset) != "jsonl":
        if env.fields:
            wrong = f"dataset {env.dataset} has columns of its own, only jsonl reads this"
            raise bad_value("env.fields", env.fields, wrong, "env=jsonl env.data_path=FILE.jsonl")
        return
    if env.dataset == "jsonl" and env.data_path is None and env.hub_name is None:
        wrong = "dataset jsonl needs a file to read"
        raise bad_value("env.data_path", env.data_path, wrong, "env.data_path=FILE.jsonl")
    if not set(env.fields) <= {"question", "messages", "answer"} or not all(env.fields.values()):
        wrong = "must name the column of question or of messages, and that of answer if there is one"
        raise bad_value("env.fields", env.fields, wrong, good)
    if {"question", "messages"} <= set(env.fields):
        raise bad_value("env.fields", env.fields, "a prompt is made of question or of messages", good)


def _check_rewards(cfg: Config) -> None:
    weights, functions = cfg.reward.weights, cfg.reward.functions
    known = [*REWARD_DATASETS, *functions]
    for name, spec in functions.items():
        _check_function(name, spec)
    for name, arguments in cfg.reward.args.items():
        key = f"reward.args.{name}"
        if name not in functions:
            wrong = "reward.functions has no function of this name"
            raise bad_value(key, arguments, wrong, f"reward.functions={{{name}:my_rewards.py:FUNCTION}} too,")
        if not isinstance(arguments, dict):
            wrong = "the arguments of a function have names"
            raise bad_value(key, arguments, wrong, f"reward.args={{{name}:{{ARGUMENT:VALUE}}}}")
    grader = cfg.eval.reward
    if grader is not None and grader not in known:
        wrong = f"there is no reward of this name, only {', '.join(known)}"
        raise bad_value("eval.reward", grader, wrong, "one of these, or null,")
    kind = dataset_kind(cfg.env.dataset)
    if grader is not None and grader not in functions and kind not in REWARD_DATASETS[grader]:
        wrong = f"this reward cannot judge env.dataset={cfg.env.dataset}"
        raise bad_value("eval.reward", grader, wrong, "null, or a reward that can,")
    if cfg.env.environment is None:
        wrong = "there is no environment that gives this reward"
        good = "env.environment=FILE.py:CLASS too,"
        if grader == "environment" and grader not in functions:
            raise bad_value("eval.reward", grader, wrong, good)
        if "environment" in weights and "environment" not in functions:
            raise bad_value("reward.weights.environment", weights["environment"], wrong, good)
    for name, weight in weights.items():
        if name in functions:
            continue
        if name not in REWARD_DATASETS:
            wrong = f"there is no reward of this name, only {', '.join(known)}"
            raise bad_value(
                f"reward.weights.{name}", weight, wrong, "e.g. reward.weights={gsm8k: 1.0, format: 0.2}"
            )
        if kind not in REWARD_DATASETS[name]:
            able = [other for other, reads in REWARD_DATASETS.items() if kind in reads]
            wrong = f"this reward cannot judge env.dataset={cfg.env.dataset}"
            raise bad_value(f"reward.weights.{name}", weight, wrong, f"a weight for one of {', '.join(able)}")
    if weights and not any(weights.values()):
        raise bad_value("reward.weights", weights, "every weight is 0", "at least one weight that is not 0")


def _check_function(name: str, spec: str) -> None:
    key = f"reward.functions.{name}"
    if name in REWARD_DATASETS:
        wrong = "a built-in reward has this name"
        raise bad_value(key, spec, wrong, f"another name, e.g. reward.functions={{my_{name}:{spec}}},")
    if not name.replace("-", "_").isidentifier():
        wrong = "a reward's name has letters, digits, _ and -"
        raise bad_value(key, spec, wrong, f"reward.functions={{my_reward:{spec}}}")
    if user_code.parse(spec) is None:
        wrong = "names no function"
        raise bad_value(key, spec, wrong, f"reward.functions={{{name}:my_rewards.py:FUNCTION}}")


def _check_length(cfg: Config) -> None:
    train, round_size = cfg.train, cfg.env.num_envs * cfg.env.repeats
    turns = train.total_dialog_turns
    if (turns is None) == (train.num_epochs is None):
        wrong = "one of train.total_dialog_turns and train.num_epochs says how long a run is"
        good = "train.num_epochs=1 or train.total_dialog_turns=64000"
        if turns is not None:
            good = f"train.total_dialog_turns=null train.num_epochs={show(train.num_epochs)}"
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
    if inference.sleep and inference.backend == "vllm" and not cuda_device_present():
        wrong = "vLLM can sleep only on a CUDA device, and there is none here"
        raise bad_value("inference_model.sleep", True, wrong, "inference_model.sleep=false")
    for key in ("inference_model.temperature", "eval.temperature"):
        value = attrgetter(key)(cfg)
        if inference.backend == "vllm" and value < VLLM_LEAST_TEMPERATURE:
            least = VLLM_LEAST_TEMPERATURE
            wrong = f"must be at least {least} with inference_model.backend=vllm, which samples at no less"
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
