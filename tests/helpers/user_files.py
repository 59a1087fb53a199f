"""Files of a user's code, as the documentation shows them, and the command that trains with them."""

from __future__ import annotations

import re
import runpy
import shlex
from collections.abc import Sequence
from pathlib import Path

from forked import run_script

SCRIPTS = {"grpo": "grpo/grpo.py", "grpo-async": "grpo/grpo-async.py", "grpo-sft": "sft/sft.py"}


def blocks_below(page: Path, title: str, level: int = 3) -> list[str]:
    """Return the texts of the code blocks in one section of a page."""
    mark = "#" * level
    section = page.read_text().split(f"{mark} {title}\n", 1)[1].split(f"\n{mark} ", 1)[0]
    return re.findall(r"^```\w*\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)


def distinct_questions(file: Path, function: str) -> dict[str, set[str]]:
    """Return the questions of each split of a data function of the documentation."""
    load = runpy.run_path(str(file))[function]
    return {split: {row["question"] for row in load(split)} for split in ("train", "test")}


def train_in(folder: Path, repo_root: Path, command: str, changes: Sequence[str]) -> str:
    """Run a command of the documentation in a folder, with changes that make it small; it must end well.

    Returns:
        What it printed.
    """
    name, *words = shlex.split(command)
    argv = [repo_root / "sota-implementations" / SCRIPTS[name], *words, *changes]
    done = run_script(argv, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout + done.stderr)
