"""Hydra's records in the folder of a run, which may be somebody else's and may be damaged.

A run writes its configuration, its overrides and Hydra's settings into ``.hydra``, and at each resumption
into ``.hydra/resume-<number>``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from torchrl_grpo.runtime.files.shared_files import read_small

# Beginning of the name of the record of a resumption, before its number.
RESUMED = "resume-"
# What parsing a damaged file raises, beside errors of the system.
DAMAGED = (ValueError, yaml.YAMLError, RecursionError)


def is_step(name: str) -> bool:
    """Return whether the name of a folder is the number of a step."""
    # isdigit() also holds for "²", which int() does not take.
    return name.isascii() and name.isdigit()


def newest_record(run_dir: Path) -> Path:
    """Return the folder of Hydra's record of the last resumption of a run, or else of its first start.

    Its number says which is the last. Times of files change when a folder is copied.
    """
    record = run_dir / ".hydra"
    numbers = [path.name.removeprefix(RESUMED) for path in record.glob(f"{RESUMED}*")]
    resumptions = [int(number) for number in numbers if is_step(number)]
    return record / f"{RESUMED}{max(resumptions)}" if resumptions else record


def read_yaml(path: Path) -> Any:
    """Return the content of a small YAML file without aliases, which Hydra does not write.

    Raises:
        OSError: it cannot be read, is a link, or is too large.
        ValueError: it is damaged; :data:`DAMAGED` has the other errors of that kind.
    """
    return yaml.load(read_small(path), _Loader)


class _Loader(yaml.SafeLoader):
    """Loads no aliases: as text, they may be huge or endless."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias")
        return super().compose_node(parent, index)
