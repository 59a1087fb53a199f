"""What of a run's settings may be published: in the card of a model, and in the results of an evaluation.

Arguments of the user's own code and of engines may be secrets, such as the key of a service. Addresses and
absolute paths tell of the machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torchrl_grpo.config.schema import Config, keys

_PRIVATE = (
    "hydra",
    "hub",
    "logging",
    "ray",
    "resume",
    "sweep",
    "env.environment_args",
    # A part has arguments of rewards and of the task too.
    "env.mixture",
    "env.task_args",
    "inference_model.engine_args",
    "inference_model.servers",
    "inference_model.server_python",
    "inference_model.weight_folder",
    "reward.args",
)
# Sections of private keys that do not change what is trained.
_NOT_TRAINING = ("hydra", "hub", "logging", "ray", "resume", "sweep")
# A path, or the server of an environment or of tools, whose command may have a key.
_PATH = re.compile(r"(^|[\s=:'\"\[{,])([/~]|(openenv|mcp):)")


def public_overrides(words: Sequence[str]) -> list[str]:
    """Return the overrides that may be published: of keys of the schema, and without paths of the machine."""
    return [word for word in words if _is_public(word)]


def shown_overrides(words: Sequence[str]) -> list[str]:
    """Return the overrides of a command with ``LEFT_OUT`` for what may not be published.

    Those that do not change what is trained are not in it, such as where the run writes.
    """
    shown = []
    for word in words:
        key, equals, _ = word.partition("=")
        if _is_public(word):
            shown.append(word)
        elif key.lstrip("+~").partition(".")[0] not in _NOT_TRAINING:
            shown.append(f"{key}{equals}LEFT_OUT")
    return shown


def _is_public(word: str) -> bool:
    key, _, value = word.lstrip("+~").partition("=")
    if _is_private(key) or _PATH.search(value):
        return False
    # A mapping for a whole section may have a private key. Groups, such as policy=dapo, are names.
    return "{" not in value or keys().free_form_parent(key) is not None


def _is_private(key: str) -> bool:
    return any(key == private or key.startswith((f"{private}.", f"{private}/")) for private in _PRIVATE)


def public_config(cfg: Config) -> dict[str, Any]:
    """Return a configuration as a mapping, without the keys that may have secrets or paths of the machine."""
    return public_entries(asdict(cfg))


def public_entries(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same of a configuration that was read from a file."""
    return _without_private(config, "")


def _without_private(section: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    entries = {}
    for name, value in section.items():
        key = f"{prefix}{name}"
        if _is_private(key) or _is_path(value):
            continue
        is_section = isinstance(value, dict) and key not in keys().free_form
        entries[name] = _without_private(value, f"{key}.") if is_section else _without_paths(value)
    return entries


def _without_paths(value: Any) -> Any:
    """Return the value of a key without the entries that are paths, however deep they are."""
    if isinstance(value, dict):
        return {name: _without_paths(entry) for name, entry in value.items() if not _is_path(entry)}
    if isinstance(value, list):
        return [_without_paths(entry) for entry in value if not _is_path(entry)]
    return value


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and _PATH.search(value) is not None
