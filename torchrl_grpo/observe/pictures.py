"""Stores the pictures of prompts, each once. Lines of ``rollouts.jsonl`` have the names of their files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

PICTURES = "pictures"


def write_pictures(run_dir: Path, shown: Iterable[Mapping[str, bytes]]) -> None:
    """Write pictures that are not there yet.

    Args:
        run_dir: folder of the run.
        shown: for each prompt, encoded pictures by the names of their files.
    """
    for files in shown:
        for name, data in files.items():
            path = run_dir / PICTURES / name
            if path.exists():
                continue
            path.parent.mkdir(exist_ok=True)
            # A run that is killed here leaves no half of a picture under its name.
            unfinished = path.with_name(f".{name}")
            unfinished.write_bytes(data)
            os.replace(unfinished, path)
