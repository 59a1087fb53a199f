"""IFEval: prompts with verifiable instructions. They are the held-out problems of a run.

Training uses composed prompts (:mod:`torchrl_grpo.data.ifeval`), because IFEval is an evaluation set.
``env.train_on_ifeval=true`` trains on the rows of IFEval and emits a warning.
"""

from __future__ import annotations

import warnings
from typing import Any

from torchrl_grpo.config import Config
from torchrl_grpo.config.derived import held_out_problems
from torchrl_grpo.config.schema import EnvConfig
from torchrl_grpo.data import problems, prompts
from torchrl_grpo.data.example import Example
from torchrl_grpo.data.ifeval import compose
from torchrl_grpo.data.ifeval.schema import clean_truth
from torchrl_grpo.data.rows import columns, sources
from torchrl_grpo.errors import ConfigError, DataError

HUB_NAME = "google/IFEval"


def load(cfg: Config) -> problems.Problems:
    """Load composed prompts to train on and IFEval rows to evaluate on.

    Args:
        cfg: configuration. IFEval is read from ``env.data_path``, or from the hub if that is not set.
            ``env.eval_data_path`` replaces IFEval as the held-out data. ``env.task_size`` prompts are
            composed from ``seed``. With ``env.train_on_ifeval`` the training problems are the rows of
            IFEval that are not held out.

    Returns:
        Problems that share no prompt. No composed prompt is in IFEval, held out or not.

    Raises:
        ConfigError: ``env.task_size`` is below 1.
        DataError: the rows cannot be found, a row is malformed, or no training rows are left after holding
            rows out.
    """
    env = cfg.env
    if env.train_on_ifeval:
        return _train_on_ifeval(cfg)
    if env.task_size < 1:
        raise ConfigError(f"env.task_size={env.task_size} composes no training prompt; write 1 or more")
    known = [] if env.data_path is None and env.eval_data_path is not None else _benchmark(env)
    rows = known
    if env.eval_data_path is not None:
        rows = sources.read_held_out(env.eval_data_path, env.eval_split)
    held_out = problems.choose(_examples(rows, env, "test"), held_out_problems(cfg))
    avoid = [columns.text(row, "prompt", "ifeval") for row in [*known, *rows]]
    composed = compose(env.task_size, cfg.seed, avoid)
    train = [
        _example(f"ifeval/composed/{i}", env, row.prompt, row.truth) for i, row in enumerate(composed, 1)
    ]
    return problems.Problems(train=train, held_out=held_out)


def example(row: sources.Row, env: EnvConfig, id: str) -> Example:
    """Convert a row to an example; ``truth`` is ``{"instruction_id_list": [...], "kwargs": [...]}``.

    Raises:
        DataError: a column is missing, an instruction is unknown, or an argument is missing or unusable.
    """
    prompt = columns.text(row, "prompt", "ifeval")
    truth = clean_truth(row.values.get("instruction_id_list"), row.values.get("kwargs"), row.where)
    return _example(id, env, prompt, truth)


def _example(id: str, env: EnvConfig, prompt: str, truth: dict[str, Any]) -> Example:
    messages = prompts.messages(env, "ifeval", prompt)
    return Example(id, messages, truth, question=prompt, trusted=prompts.trusted(env, "ifeval"))


def _train_on_ifeval(cfg: Config) -> problems.Problems:
    warnings.warn(
        "env.train_on_ifeval=true: the run trains on prompts of the IFEval benchmark, so its IFEval "
        "accuracies do not measure how well the model follows instructions in general",
        UserWarning,
        stacklevel=3,
    )
    env = cfg.env
    source = env.data_path if env.data_path is not None else HUB_NAME
    train = _examples(_benchmark(env), env, "train")
    if env.eval_data_path is None:
        return problems.split_off(train, held_out_problems(cfg), source)
    held_out = _examples(sources.read_held_out(env.eval_data_path, env.eval_split), env, "test")
    chosen = problems.choose(held_out, held_out_problems(cfg))
    return problems.separate(problems.Problems(train, chosen), source)


def _benchmark(env: EnvConfig) -> list[sources.Row]:
    """Read IFEval's rows. The hub has a single split ``train``; the original file is ``input_data.jsonl``."""
    if env.data_path is None:
        name = env.hub_name if env.hub_name is not None else HUB_NAME
        source = sources.open_hub(sources.Hub(name, (env.hub_subset,)))
    else:
        source = sources.open_path(env.data_path, "env.data_path")
    split = env.eval_split if env.eval_data_path is None else None
    if split is not None:
        source.check("env.eval_split", split)
        return source.read(split)
    first_split = source.first("test", "train", "input_data")
    if source.names and first_split is None:
        raise DataError(
            f"{source.label} has neither a test nor a train split; its splits are {', '.join(source.names)}; "
            f"write for example env.eval_split={source.names[0]}, or name IFEval's JSONL file"
        )
    return source.read(first_split or "")


def _examples(rows: list[sources.Row], env: EnvConfig, split: str) -> list[Example]:
    return [example(row, env, f"ifeval/{split}/{i}") for i, row in enumerate(rows, 1)]
