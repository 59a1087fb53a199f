"""Which keys of a configuration run code, or let another program say what is computed.

The user is asked before such keys of a configuration that somebody else may have written, as that of a run
folder, are obeyed (:mod:`torchrl_grpo.cli.model_argument`).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from torchrl_grpo.config.judges import JUDGE
from torchrl_grpo.config.mixture import MixturePart, mixture_parts
from torchrl_grpo.config.remote import is_remote
from torchrl_grpo.config.schema import Config
from torchrl_grpo.runtime import user_code

# Keys that run code if they have another value than their default. Some arguments of engines name modules to
# load, Ray runs what its cluster sends, and a judge without a sandbox runs what the model writes.
_KEYS = (
    *("model.trust_remote_code", "reward.functions", "reward.sandbox", "ray.address"),
    *("inference_model.server_python", "inference_model.servers", "inference_model.engine_args"),
)


def keys_with_code(cfg: Config) -> dict[str, Any]:
    """Return the keys that run code of a user, of a model or of another machine, with their values."""
    usual, values = Config(), {key: attrgetter(key)(cfg) for key in _KEYS}
    codes = {key: value for key, value in values.items() if value != attrgetter(key)(usual)}
    judges = [name for name, spec in cfg.reward.functions.items() if spec == JUDGE]
    if judges:
        # Its address gets what the model writes, and the key that a variable of the user has.
        codes["reward.args"] = {name: cfg.reward.args.get(name, {}) for name in judges}
    env = cfg.env
    names: dict[str, Sequence[str | None]] = {
        "env.dataset": [env.dataset],
        "env.environment": [env.environment],
        "env.tools": env.tools,
    }
    codes |= {key: attrgetter(key)(cfg) for key, specs in names.items() if any(map(_is_own, specs))}
    if any(_has_code(part, cfg) for part in mixture_parts(cfg)):
        codes["env.mixture"] = env.mixture
    return codes


def _is_own(name: str | None) -> bool:
    return name is not None and (is_remote(name) or user_code.parse(name) is not None)


def _has_code(part: MixturePart, cfg: Config) -> bool:
    rewards = part.cfg.reward
    return _is_own(part.cfg.env.dataset) or bool(rewards.functions) or rewards.sandbox != cfg.reward.sandbox
