"""What a report says of a run besides its measurements: command, configuration, plan of devices, versions.

All are those of the newest start, such as the last resumption. :func:`record` writes plan and versions into
Hydra's record of the run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from torchrl_grpo.checkpoints.run_dir import public_command
from torchrl_grpo.config.public import public_entries, public_overrides
from torchrl_grpo.config.schema import Config, keys
from torchrl_grpo.observe.metrics import jsonable
from torchrl_grpo.rewards.registry import eval_reward_name
from torchrl_grpo.runtime.files.run_records import DAMAGED, newest_record, read_yaml
from torchrl_grpo.runtime.files.shared_files import read_small, replace
from torchrl_grpo.runtime.hardware import processor
from torchrl_grpo.runtime.package_versions import commit, versions

RECORD = Path(".hydra/about.json")
_ENTRIES: Mapping[str, type] = {"plan": str, "versions": dict, "machine": str, "started": str, "right": dict}


def record(run_dir: Path, cfg: Config, plan: str) -> None:
    """Write what only the run itself knows.

    Args:
        run_dir: folder of the run.
        cfg: configuration of the run.
        plan: table of roles and devices.

    Raises:
        OSError: it cannot be written.
    """
    path = run_dir / RECORD
    path.parent.mkdir(parents=True, exist_ok=True)
    known_commit = commit()
    threshold = 1.0 if cfg.eval.threshold is None else cfg.eval.threshold
    entries = {
        "plan": plan,
        "versions": {
            **versions("ray", "accelerate", "datasets"),
            **({} if known_commit is None else {"commit": known_commit}),
        },
        "machine": f"{platform.system()} {platform.release()}, {os.cpu_count()} cores of {processor()}",
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        # Which responses count as right, in the history of a problem.
        "right": {"reward": eval_reward_name(cfg), "threshold": threshold},
    }
    replace(path, json.dumps(entries, indent=1) + "\n")


def about(run_dir: Path) -> dict[str, Any]:
    """Return the entries of :func:`record`, ``command``, ``config`` and ``overrides``, without secrets.

    What the folder does not have is empty. Links are not followed: the folder may be somebody else's, and the
    page may be shared.
    """
    hydra = _record_of(run_dir)
    overrides = None if hydra is None else _read(hydra / "overrides.yaml")
    words = [word for word in overrides if isinstance(word, str)] if isinstance(overrides, list) else []
    recorded = {} if hydra is None else _as_mapping(jsonable(_read(run_dir / RECORD, _read_json)))
    return {
        **{
            name: recorded[name] if isinstance(recorded.get(name), kind) else kind()
            for name, kind in _ENTRIES.items()
        },
        "command": "" if hydra is None else public_command(hydra),
        "overrides": public_overrides(words),
        "config": _settings(_config(hydra), words),
    }


def all_settings(run_dir: Path) -> dict[str, str]:
    """Return the text of each value of a run's configuration, also of those that may be secrets.

    It is for comparing runs, and must not be shown. Mappings whose keys the user chooses are one value.
    """
    return {
        key: _text(value)
        for key, value in _flat(_config(_record_of(run_dir)), whole=frozenset(keys().free_form))
    }


def _record_of(run_dir: Path) -> Path | None:
    hydra = newest_record(run_dir)
    return None if hydra.is_symlink() or (run_dir / ".hydra").is_symlink() else hydra


def _config(hydra: Path | None) -> dict[str, Any]:
    return {} if hydra is None else _as_mapping(_read(hydra / "config.yaml"))


def _settings(config: Mapping[str, Any], words: list[str]) -> list[dict[str, Any]]:
    """Return each key with its value, and whether it was set on the command line or is not the default."""
    defaults = dict(_flat(dataclasses.asdict(Config())))
    set_keys = {word.lstrip("+~").partition("=")[0] for word in words}
    return [
        {
            "key": key,
            "value": _text(value),
            "overridden": any(key == name or key.startswith(f"{name}.") for name in set_keys),
            "changed": _text(value) != _text(defaults.get(key)),
        }
        for key, value in _flat(public_entries(config))
    ]


def _text(value: Any) -> str:
    # YAML has the names of choices, and dates.
    return json.dumps(
        value, default=lambda other: other.name if isinstance(other, Enum) else str(other), skipkeys=True
    )


def _flat(
    section: Mapping[str, Any], prefix: str = "", whole: frozenset[str] = frozenset()
) -> list[tuple[str, Any]]:
    entries: list[tuple[str, Any]] = []
    for name, value in section.items():
        if isinstance(value, Mapping) and value and f"{prefix}{name}" not in whole:
            entries += _flat(value, f"{prefix}{name}.", whole)
        else:
            entries.append((f"{prefix}{name}", value))
    return entries


def _read(path: Path, parse: Callable[[Path], Any] = read_yaml) -> Any:
    try:
        return parse(path)
    except (OSError, *DAMAGED):
        # The folder may be a copy of the measurements alone.
        return None


def _read_json(path: Path) -> Any:
    return json.loads(read_small(path))


def _as_mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
