"""The parts of a mixture of data sets: ``env.mixture``, each with a configuration of its own."""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass
from typing import Any

from torchrl_grpo.config.builtin import dataset_kind
from torchrl_grpo.config.keys import show, typed
from torchrl_grpo.config.schema import Config, EnvConfig, RewardConfig
from torchrl_grpo.config.values import AnswerFormat
from torchrl_grpo.errors import ConfigError

# Keys of a data set. A part that does not write one has its default, and not the value of the whole run.
OF_A_DATASET = (
    "task", "task_args", "data_path", "eval_data_path", "hub_name", "hub_subset", "train_split", "eval_split",
    "fields", "train_on_ifeval", "shuffle_buffer",
)  # fmt: skip
# Keys of env that a part may set.
_OF_ENV = (
    *OF_A_DATASET, "dataset", "task_size", "system_prompt", "prompt_template", "answer_format",
    "control_tokens_in_data",
)  # fmt: skip
_OWN = ("name", "weight", "reward", "eval_reward")


@dataclass(frozen=True)
class MixturePart:
    """One part of a mixture.

    Attributes:
        name: name in metrics and in the problems.
        weight: weight in the draw.
        cfg: configuration of a run on this part alone.
    """

    name: str
    weight: float
    cfg: Config


def mixture_parts(cfg: Config) -> list[MixturePart]:
    """Return the parts of ``env.mixture``; empty without a mixture. Their values are not checked.

    Raises:
        ConfigError: a part is no mapping, has an unknown key or a wrong type, or two have the same name.
    """
    parts: dict[str, MixturePart] = {}
    for number, entry in enumerate(cfg.env.mixture):
        part = _part(cfg, entry, f"env.mixture[{number}]")
        if part.name in parts:
            raise ConfigError(
                f"env.mixture has two parts {part.name!r}; give one another name, "
                f"e.g. {{name: {part.name}_2, ...}}"
            )
        parts[part.name] = part
    return list(parts.values())


def _part(cfg: Config, entry: Any, key: str) -> MixturePart:
    if not isinstance(entry, dict):
        raise ConfigError(f"{key}={show(entry)}: a part is a mapping; write {{dataset: NAME, weight: 1.0}}")
    unknown = [name for name in entry if name not in _OF_ENV and name not in _OWN]
    if unknown:
        known = [*_OWN, *_OF_ENV]
        names = difflib.get_close_matches(unknown[0], known, n=1) or known
        raise ConfigError(f"{key}.{unknown[0]}: a part has no such key; write {' or '.join(names)} instead")
    if "dataset" not in entry:
        raise ConfigError(f"{key}={show(entry)}: a part needs a data set; write {{dataset: NAME, ...}}")
    weight = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise ConfigError(
            f"{key}.weight={show(weight)}: it must be a number greater than 0; write 1.0, for example"
        )
    start = {name: getattr(EnvConfig(), name) for name in OF_A_DATASET}
    base = {**vars(cfg.env), **start, "mixture": []}
    env = typed(EnvConfig, {name: entry[name] for name in entry if name in _OF_ENV}, key, base)
    is_own = dataset_kind(env.dataset) == "jsonl" and "answer_format" not in entry
    if is_own and env.answer_format == AnswerFormat.tags:
        # One's own data keeps its prompt as it is, unless the part asks for tags.
        env.answer_format = AnswerFormat.plain
    reward = entry.get("reward", {})
    if not isinstance(reward, dict):
        raise ConfigError(
            f"{key}.reward={show(reward)}: it must be a mapping; write {{weights: {{NAME: 1.0}}}}"
        )
    own: dict[str, Any] = {"weights": {}, "functions": {}, "args": {}}
    rewards = typed(RewardConfig, reward, f"{key}.reward", {**vars(cfg.reward), **own})
    # Of a file with its path, the last part is enough.
    default = str(entry.get("task") or entry["dataset"]).rpartition("/")[2].replace(":", ".")
    name = entry.get("name", default)
    if not isinstance(name, str) or not name.strip() or "/" in name:
        raise ConfigError(f"{key}.name={show(name)}: it must be a name without /; write sums, for example")
    evaluation = dataclasses.replace(cfg.eval, reward=entry.get("eval_reward"))
    whole = dataclasses.replace(cfg, env=env, reward=rewards, eval=evaluation)
    return MixturePart(name, float(weight), whole)
