"""Checks of the data, the environment and the rewards of a run."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING

from torchrl_grpo.config.builtin import DATASETS, ENVIRONMENTS, REWARDS, TOOLS, dataset_kind
from torchrl_grpo.config.derived import has_episodes
from torchrl_grpo.config.keys import bad_value, show
from torchrl_grpo.config.mixture import mixture_parts
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.runtime import user_code

if TYPE_CHECKING:
    from torchrl_grpo.config.schema import Config, EnvConfig


def check_data(cfg: Config) -> None:
    """Check ``env``, ``reward`` and ``eval.reward``, and those of each part of a mixture.

    Raises:
        ConfigError: a value is invalid.
    """
    _check_mixture(cfg)
    _check_task(cfg)
    _check_episodes(cfg)
    _check_sampling(cfg)
    _check_rewards(cfg)


def _check_mixture(cfg: Config) -> None:
    parts = mixture_parts(cfg)
    if not parts:
        return
    env, default = cfg.env, type(cfg.env)()
    of_one_data_set = {
        "env.task": (env.task, default.task),
        "env.task_args": (env.task_args, default.task_args),
        "env.data_path": (env.data_path, default.data_path),
        "env.eval_data_path": (env.eval_data_path, default.eval_data_path),
        "env.hub_name": (env.hub_name, default.hub_name),
        "env.hub_subset": (env.hub_subset, default.hub_subset),
        "env.train_split": (env.train_split, default.train_split),
        "env.eval_split": (env.eval_split, default.eval_split),
        "env.fields": (env.fields, default.fields),
    }
    for key, (value, unset) in of_one_data_set.items():
        if value != unset:
            wrong = "with env.mixture each part has its own data set"
            raise bad_value(key, value, wrong, f"it in the parts that need it, and {key}={show(unset)}")
    reward = cfg.reward
    for name, given in {
        "weights": reward.weights,
        "functions": reward.functions,
        "args": reward.args,
    }.items():
        if given:
            wrong = "with env.mixture each part has its own rewards"
            raise bad_value(
                f"reward.{name}", given, wrong, f"reward: {{{name}: ...}} in the parts, and nothing here"
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
        wrong = f"env.task={env.task} is generated when it is drawn, and an episode's prompt is made before"
        good = "another env.dataset, or env.environment=null env.tools=[] for answers of one turn,"
        raise bad_value("env.dataset", env.dataset, wrong, good)
    if cfg.collector.partial_rollout:
        wrong = f"an episode stays with the worker that has its environment, and {key}={show(value)} is set"
        raise bad_value("collector.partial_rollout", True, wrong, "collector.partial_rollout=false")
    if env.overlong_prompts in ("truncate_left", "truncate_right", "truncate_middle"):
        wrong = f"cutting a question would change the problem of {key}={show(value)}"
        raise bad_value("env.overlong_prompts", env.overlong_prompts, wrong, "env.overlong_prompts=drop")


def _check_sampling(cfg: Config) -> None:
    env, default = cfg.env, type(cfg.env)()
    of_pass_rates = {
        "env.pass_rate_bands": (env.pass_rate_bands, default.pass_rate_bands),
        "env.pass_rate_weights": (env.pass_rate_weights, default.pass_rate_weights),
        "env.unseen_weight": (env.unseen_weight, default.unseen_weight),
    }
    for key, (value, unset) in of_pass_rates.items():
        if env.sampling == "uniform" and value != unset:
            wrong = "env.sampling=uniform reads no pass rates"
            raise bad_value(key, value, wrong, "env.sampling=pass_rate too,")
    bands, weights = env.pass_rate_bands, env.pass_rate_weights
    if sorted(set(bands)) != bands or not all(0 <= bound <= 1 for bound in bands):
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
        good = "train.total_dialog_turns=64000 train.num_epochs=null, or env.sampling=uniform"
        raise bad_value("train.num_epochs", cfg.train.num_epochs, wrong, good)
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
        raise bad_value("env.task", env.task, wrong, "env.task=null or env.dataset=reasoning_gym")
    if not generated and not own and env.task_args:
        wrong = f"dataset {env.dataset} has no tasks, only reasoning_gym has"
        raise bad_value(
            "env.task_args", env.task_args, wrong, "env.task_args={} or env.dataset=reasoning_gym"
        )
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
        wrong = "the benchmark's rows are in env.eval_split, and training prompts are composed"
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
    known = {"question", "messages", "answer", "solution", "identity"}
    if not set(env.fields) <= known or not all(env.fields.values()):
        wrong = "must name the column of question or of messages, and that of answer if there is one"
        raise bad_value("env.fields", env.fields, wrong, good)
    if {"question", "messages"} <= set(env.fields):
        raise bad_value("env.fields", env.fields, "a prompt is made of question or of messages", good)


def _check_rewards(cfg: Config) -> None:
    weights, functions = cfg.reward.weights, cfg.reward.functions
    known = [*REWARDS, *functions]
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
    if grader is not None and grader not in functions and kind not in REWARDS[grader].datasets:
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
        if name not in REWARDS:
            wrong = f"there is no reward of this name, only {', '.join(known)}"
            raise bad_value(
                f"reward.weights.{name}", weight, wrong, "e.g. reward.weights={gsm8k: 1.0, format: 0.2}"
            )
        if kind not in REWARDS[name].datasets:
            able = [other for other, reward in REWARDS.items() if kind in reward.datasets]
            wrong = f"this reward cannot judge env.dataset={cfg.env.dataset}"
            raise bad_value(f"reward.weights.{name}", weight, wrong, f"a weight for one of {', '.join(able)}")
    if weights and not any(weights.values()):
        raise bad_value("reward.weights", weights, "every weight is 0", "at least one weight that is not 0")


def _check_function(name: str, spec: str) -> None:
    key = f"reward.functions.{name}"
    if name in REWARDS:
        wrong = "a built-in reward has this name"
        raise bad_value(key, spec, wrong, f"another name, e.g. reward.functions={{my_{name}:{spec}}},")
    if not name.replace("-", "_").isidentifier():
        wrong = "a reward's name has letters, digits, _ and -"
        raise bad_value(key, spec, wrong, f"reward.functions={{my_reward:{spec}}}")
    if user_code.parse(spec) is None:
        wrong = "names no function"
        raise bad_value(key, spec, wrong, f"reward.functions={{{name}:my_rewards.py:FUNCTION}}")
