"""Checks of the data, the environment and the rewards of a run."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_grpo.config.builtin import DATASETS, ENVIRONMENTS, NO_REWARDS, REWARDS, TOOLS, dataset_kind
from torchrl_grpo.config.checks.unread import check_unset
from torchrl_grpo.config.derived import has_episodes, reward_weights
from torchrl_grpo.config.judges import check_model_reward, is_model, is_ranking
from torchrl_grpo.config.keys import bad_value, show
from torchrl_grpo.config.mixture import OF_A_DATASET
from torchrl_grpo.config.remote import MCP, OPENENV, check_remote, is_remote
from torchrl_grpo.runtime import user_code

if TYPE_CHECKING:
    from torchrl_grpo.config.schema import Config, EnvConfig

_FIELDS = ("question", "messages", "answer", "solution", "identity", "images")
# Names that a Composite of TorchRL refuses.
_OF_SPECS = ("device", "dtype", "shape", "space")


def check_data(cfg: Config) -> None:
    """Check ``env``, ``reward`` and ``eval.reward`` of a run, or of a part of a mixture.

    Raises:
        ConfigError: a value is invalid.
    """
    check_dataset(cfg.env.dataset)
    if not cfg.env.mixture:  # whose parts have data sets of their own
        _check_task(cfg)
    _check_episodes(cfg)
    _check_sampling(cfg)
    check_rewards(cfg, reward_weights(cfg))
    if cfg.env.environment is None and "environment" not in cfg.reward.functions:
        wrong = "there is no environment that gives this reward"
        fix = "env.environment=FILE.py:CLASS beside it"
        if cfg.eval.reward == "environment":
            raise bad_value("eval.reward", "environment", wrong, fix)
        if (weight := cfg.reward.weights.get("environment")) is not None:
            raise bad_value("reward.weights.environment", weight, wrong, fix)


def check_mixture(cfg: Config) -> None:
    """Check the keys of a run that ``env.mixture`` takes the place of.

    Raises:
        ConfigError: one is set, or means nothing for a mixture.
    """
    if not cfg.env.mixture:
        return
    wrong = "each part of env.mixture has its own"
    check_unset(cfg, "env", " ".join(OF_A_DATASET), wrong, also=", and set it in the parts")
    check_unset(cfg, "reward", "weights functions args", wrong, also=", and reward={...} in the parts")
    check_unset(cfg, "eval", "reward", wrong, also=", and eval_reward in the parts")
    wrong = "the parts of env.mixture have different rewards, of which no group has all"
    check_unset(cfg, "policy", "reward_combination", wrong)


def check_dataset(dataset: str) -> None:
    """Check the name of a data set.

    Raises:
        ConfigError: it is neither a built-in one nor a function of the user.
    """
    if dataset in DATASETS:
        # A folder may have the same name.
        return
    if dataset.endswith((".jsonl", ".json", ".parquet")) or Path(dataset).is_dir():
        wrong = "it is a path, and env.dataset is the kind of data"
        raise bad_value("env.dataset", dataset, wrong, f"env=jsonl env.data_path={dataset}")
    if dataset.count("/") == 1 and ":" not in dataset and not dataset.endswith(".py"):
        wrong = "it is a name on the hub, and env.dataset is the kind of data"
        raise bad_value("env.dataset", dataset, wrong, f"env=jsonl env.hub_name={dataset}")
    _check_name("env.dataset", dataset, dataset, DATASETS)


def _check_name(
    key: str, value: str | list[str], name: str, built_in: Collection[str], kind: str = "function"
) -> None:
    if name in built_in or user_code.parse(name) is not None:
        return
    close = difflib.get_close_matches(name, built_in, n=1)
    wrong = f"{show(name)} is none of {', '.join(built_in)}, and names no {kind} of your own"
    good = close[0] if close else f"FILE.py:{kind.upper()}"
    raise bad_value(key, value, wrong, f"{key}=[{good}]" if isinstance(value, list) else f"{key}={good}")


def _check_episodes(cfg: Config) -> None:
    env = cfg.env
    if env.environment is not None and is_remote(env.environment):
        check_remote("env.environment", env.environment, env.environment, OPENENV)
    elif env.environment is not None:
        _check_name("env.environment", env.environment, env.environment, ENVIRONMENTS, "class")
    for tool in env.tools:
        if is_remote(tool):
            check_remote("env.tools", env.tools, tool, MCP)
        else:
            _check_name("env.tools", env.tools, tool, TOOLS)
    if env.environment == "shell" and "shell" not in env.tools:
        wrong = "it grades the folder of the tool shell, which is not in env.tools"
        raise bad_value("env.environment", "shell", wrong, "env.tools=[shell] beside it")
    if len(set(env.tools)) != len(env.tools):
        once = show(list(dict.fromkeys(env.tools)))
        raise bad_value("env.tools", env.tools, "it names a tool twice", f"env.tools={once}")
    if env.allowed_tools and not any(map(is_remote, (*env.tools, env.environment or ""))):
        wrong = "no server offers tools, and of the others env.tools names each"
        check_unset(cfg, "env", "allowed_tools", wrong, also=", or env.tools=[mcp:COMMAND]")
    if not has_episodes(cfg):
        return
    key = "env.environment" if env.environment is not None else "env.tools"
    whose = f"{key}={show(env.environment if env.environment is not None else env.tools)}"
    if env.dataset == "reasoning_gym":
        wrong = f"env.task={env.task} is generated when it is drawn, and an episode's prompt is made before"
        fix = "another env.dataset, or env.environment=null env.tools=[] for answers of one turn"
        raise bad_value("env.dataset", env.dataset, wrong, fix)
    if cfg.collector.partial_rollout:
        wrong = f"an episode stays with the worker that has its environment, and {whose} is set"
        raise bad_value("collector.partial_rollout", True, wrong, "collector.partial_rollout=false")
    if env.overlong_prompts in ("truncate_left", "truncate_right", "truncate_middle"):
        wrong = f"a question that is cut would be another problem for {whose}"
        raise bad_value("env.overlong_prompts", env.overlong_prompts, wrong, "env.overlong_prompts=drop")


def _check_sampling(cfg: Config) -> None:
    env = cfg.env
    bands, weights = env.pass_rate_bands, env.pass_rate_weights
    if sorted(set(bands)) != bands or not all(0 <= bound <= 1 for bound in bands):
        wrong = "it must be numbers from 0 to 1 in increasing order"
        raise bad_value("env.pass_rate_bands", bands, wrong, "env.pass_rate_bands=[0.1,0.9]")
    if len(weights) != len(bands) + 1 or min(weights) < 0 or max(weights) <= 0:
        wrong = f"it must be {len(bands) + 1} numbers, one for each band, of at least 0 and not all of them 0"
        fix = f"env.pass_rate_weights={show([1.0] * (len(bands) + 1))}"
        raise bad_value("env.pass_rate_weights", weights, wrong, fix)
    if env.sampling == "pass_rate" and env.mixture:
        raise bad_value(
            "env.sampling", env.sampling, "the shares of env.mixture are fixed", "env.sampling=uniform"
        )
    if env.sampling == "pass_rate" and cfg.train.num_epochs is not None:
        wrong = "env.sampling=pass_rate draws with replacement and has no epochs"
        fix = "train.total_dialog_turns=64000 train.num_epochs=null, or env.sampling=uniform"
        raise bad_value("train.num_epochs", cfg.train.num_epochs, wrong, fix)
    if env.order_by is None:
        return
    if env.shuffle or env.sampling != "uniform":
        wrong = "an order needs env.shuffle=false and env.sampling=uniform"
        fix = f"env.order_by={env.order_by} env.shuffle=false env.sampling=uniform"
        raise bad_value("env.order_by", env.order_by, wrong, fix)
    if env.dataset in ("reasoning_gym", "pictures") or env.mixture:
        wrong = "generated problems have no columns, and a mixture has an order of its own"
        raise bad_value("env.order_by", env.order_by, wrong, "env.order_by=null")


def _check_task(cfg: Config) -> None:
    env = cfg.env
    own, drawn = user_code.parse(env.dataset) is not None, env.dataset == "pictures"
    generated = drawn or env.dataset == "reasoning_gym"
    if env.dataset == "reasoning_gym" and env.task is None:
        wrong = "env.dataset=reasoning_gym needs the name of a task"
        raise bad_value("env.task", None, wrong, "env.task=chain_sum, for example")
    if not generated and not own:
        wrong = f"env.dataset={env.dataset} has no tasks, only reasoning_gym has"
        check_unset(cfg, "env", "task_args", wrong, also=", or env=reasoning_gym")
    if generated or own:
        names = "data_path eval_data_path hub_name hub_subset train_split eval_split"
        wrong = f"env.dataset={env.dataset} reads neither files nor the hub, and has no splits"
        check_unset(cfg, "env", names, wrong)
    for key, path in (("env.data_path", env.data_path), ("env.eval_data_path", env.eval_data_path)):
        if path is not None and (not path.strip() or not Path(path).exists()):
            where = "" if Path(path).is_absolute() else f" below {Path.cwd()}"
            wrong = f"there is no such file or folder{where}"
            raise bad_value(key, path, wrong, f"{key}=<a path that exists>")
    if env.shuffle_buffer is not None and (env.data_path is not None or env.dataset == "ifeval" or generated):
        wrong = "files are read whole, and so is what env.dataset=ifeval, reasoning_gym and pictures read"
        raise bad_value("env.shuffle_buffer", env.shuffle_buffer, wrong, "env.shuffle_buffer=null")
    _check_jsonl(cfg)
    for key, split in (("env.train_split", env.train_split), ("env.eval_split", env.eval_split)):
        if split is not None and not split.strip():
            raise bad_value(key, "''", "it must not be empty", f"{key}=NAME or {key}=null")
    if env.dataset == "ifeval":
        wrong = "the benchmark's rows are those of env.eval_split, and other training prompts are composed"
        check_unset(cfg, "env", "train_split", wrong)
    if env.overlong_prompts == "drop" and generated:
        wrong = f"problems of {env.dataset} are generated when they are drawn, and not known before"
        fix = "env.overlong_prompts=error" + ("" if drawn else " or env.overlong_prompts=truncate_right")
        raise bad_value("env.overlong_prompts", env.overlong_prompts, wrong, fix)
    if "{question}" not in env.prompt_template:
        wrong = "it does not say where the question goes"
        fix = "env.prompt_template='{question}', for example"
        raise bad_value("env.prompt_template", env.prompt_template, wrong, fix)


def _check_jsonl(cfg: Config) -> None:
    env = cfg.env
    # Any data of the user's own is of this kind, of whatever format.
    if dataset_kind(env.dataset) != "jsonl":
        wrong = f"env.dataset={env.dataset} has columns of its own, and only jsonl reads this"
        check_unset(cfg, "env", "fields", wrong, also=", or env=jsonl env.data_path=FILE.jsonl")
        return
    check_source(env)
    check_fields(env)


def check_source(env: EnvConfig) -> None:
    """Check that a data set of rows has something to read.

    Raises:
        ConfigError: neither ``env.data_path`` nor ``env.hub_name`` is set.
    """
    if env.dataset == "jsonl" and env.data_path is None and env.hub_name is None:
        wrong = "env.dataset=jsonl needs a file to read"
        raise bad_value("env.data_path", None, wrong, "env.data_path=FILE.jsonl or env.hub_name=NAME")


def check_fields(env: EnvConfig) -> None:
    """Check the columns of a data set of rows.

    Raises:
        ConfigError: ``env.fields`` has an unknown key or an empty column, or both ``question`` and
            ``messages``.
    """
    fix = "env.fields={question:COLUMN,answer:COLUMN}"
    for name in env.fields:
        if name not in _FIELDS:
            close = difflib.get_close_matches(name, _FIELDS, n=1)
            own = {close[0] if close and role == name else role: env.fields[role] for role in env.fields}
            wrong = f"{name} is none of {', '.join(_FIELDS)}"
            raise bad_value("env.fields", env.fields, wrong, f"env.fields={show(own)}" if close else fix)
    if not all(env.fields.values()):
        wrong = "it must name the column of question or of messages, and that of answer if there is one"
        raise bad_value("env.fields", env.fields, wrong, fix)
    if {"question", "messages"} <= set(env.fields):
        raise bad_value("env.fields", env.fields, "a prompt is made of question or of messages", fix)


def check_rewards(cfg: Config, weights: Mapping[str, float]) -> None:
    """Check ``reward.functions``, ``reward.args`` and ``eval.reward``, and weights of rewards.

    Args:
        cfg: configuration.
        weights: ``reward.weights``, or the weights that stand for them.

    Raises:
        ConfigError: a name is unknown, a weight is not finite, or a reward does not support the data set.
    """
    functions = cfg.reward.functions
    for name, spec in functions.items():
        _check_function(name, spec)
    for name, arguments in cfg.reward.args.items():
        key = f"reward.args.{name}"
        if name not in functions:
            wrong = "reward.functions has no function of this name"
            fix = f"reward.functions={{{name}:my_rewards.py:FUNCTION}} beside it"
            raise bad_value(key, arguments, wrong, fix)
        if not isinstance(arguments, dict):
            wrong = "the arguments of a function have names"
            raise bad_value(key, arguments, wrong, f"reward.args={{{name}:{{ARGUMENT:VALUE}}}}")
    for name, spec in functions.items():
        if is_model(spec):
            check_model_reward(cfg, name)
    if cfg.eval.reward is not None and is_ranking(cfg, cfg.eval.reward):
        wrong = "a judge that ranks a group says nothing about one response"
        fix = "eval.reward=REWARD with another reward, perhaps a second judge with mode: absolute"
        raise bad_value("eval.reward", cfg.eval.reward, wrong, fix)
    if cfg.eval.reward is not None:
        _check_reward(cfg, cfg.eval.reward, "eval.reward", cfg.eval.reward, "eval.reward={}")
    for name, weight in weights.items():
        key = f"reward.weights.{name}"
        if not math.isfinite(weight):
            raise bad_value(key, weight, "it must be finite", f"{key}=1.0")
        _check_reward(cfg, name, key, weight, "reward.weights={{{}:1.0}}")
    if weights and not any(weights.values()):
        raise bad_value("reward.weights", weights, "every weight is 0", "a weight that is not 0 for one")


def _check_reward(cfg: Config, name: str, key: str, value: Any, fix: str) -> None:
    if name in cfg.reward.functions:
        return
    kind = dataset_kind(cfg.env.dataset)
    able = [*(other for other, reward in REWARDS.items() if kind in reward.datasets), *cfg.reward.functions]
    if name not in REWARDS:
        wrong = f"there is no reward of this name among {', '.join([*REWARDS, *cfg.reward.functions])}"
        close = difflib.get_close_matches(name, able, n=1)
        own = f"reward.functions={{{name}:FILE.py:{name}}} beside it"
        fix = f"{fix.format(close[0] if close else able[0])}, for example, or {own}"
        raise bad_value(key, value, wrong, fix)
    if name not in able:
        wrong = f"this reward cannot judge env.dataset={cfg.env.dataset}"
        raise bad_value(key, value, wrong, f"{fix.format(able[0])}, or one of {', '.join(able[1:])}")


def _check_function(name: str, spec: str) -> None:
    key = f"reward.functions.{name}"
    taken = {
        **dict.fromkeys(_OF_SPECS, "TorchRL's specs have an attribute of this name"),
        **dict.fromkeys(NO_REWARDS, f"the metric reward/{name} is of all rewards"),
        **dict.fromkeys(REWARDS, "a built-in reward has this name"),
    }
    if name in taken:
        raise bad_value(key, spec, taken[name], f"another name, as in reward.functions={{my_{name}:{spec}}}")
    if not name.replace("-", "_").isidentifier():
        wrong = "a reward's name has letters, digits, _ and -"
        raise bad_value(key, spec, wrong, f"reward.functions={{my_reward:{spec}}}")
    if not is_model(spec) and user_code.parse(spec) is None:
        wrong = "it names no function"
        fix = f"reward.functions={{{name}:my_rewards.py:FUNCTION}}, or judge or hf:MODEL in place of the file"
        raise bad_value(key, spec, wrong, fix)
