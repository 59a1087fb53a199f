"""The groups of configurations, such as ``env`` and ``policy``, for messages about their files."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

from torchrl_grpo.runtime import user_code
from torchrl_grpo.runtime.config_dir import config_dir

# Groups from which no primary configuration of the project has to choose. Hydra wants a + in front of these.
ADDED = ("recipe", "method")


@functools.cache
def groups(tree: Path | None = None) -> Mapping[str, Sequence[str]]:
    """Return the names of the files of each group of a configuration tree; None for that of the project."""
    # The folder "accelerate" holds files for `accelerate launch` and is not a group.
    folders = [
        path for path in (tree or config_dir()).iterdir() if path.is_dir() and path.name != "accelerate"
    ]
    files = {folder.name: sorted(path.stem for path in folder.glob("*.yaml")) for folder in sorted(folders)}
    return {group: options for group, options in files.items() if options}


def choice(group: str, value: str, options: Sequence[str] | None = None, sign: str | None = None) -> str:
    """Return what to write to choose from a group, without the word "instead".

    Args:
        group: name of the group.
        value: what the user wrote for it.
        options: files of the group; None for those of the project.
        sign: what stands in front of the group; None for what a command without a choice of its own needs.
    """
    if group == "method" and value == "grpo":
        # That of every configuration that chooses no other.
        return "train.method=grpo"
    if group == "env" and user_code.parse(value) is not None:
        return f"env.environment={value} for a class or env.dataset={value} for a function that loads rows"
    if group == "env" and value.endswith((".jsonl", ".json", ".parquet", ".csv")):
        return f"env=jsonl env.data_path={value}"
    options = groups()[group] if options is None else options
    key = f"{('+' if group in ADDED else '') if sign is None else sign}{group}"
    close = [value] if value in options else difflib.get_close_matches(value, options, n=1)
    return f"{key}={close[0]}" if close else f"{key}= and one of {', '.join(options)}"


def of_option(value: str | None) -> str | None:
    """Return the only group that has a file ``value``, or None."""
    having = [group for group, options in groups().items() if value in options]
    return having[0] if len(having) == 1 else None
