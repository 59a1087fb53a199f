"""The words that started this process: an interpreter or a launcher, and a script or an installed command."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from torchrl_grpo.runtime import rank_env


def program(name: str) -> list[str]:
    """Return the words in front of the arguments with which to start a command as this process was started.

    Args:
        name: name of the command, such as ``grpo``. If this process is another command, its script is
            returned.
    """
    called = sys.argv[0]
    if Path(called).stem != name:
        return [f"{name}.py"]
    if not called.endswith(".py"):
        short = Path(called).name
        return [short if shutil.which(short) == called else called]
    words = list(sys.orig_argv)
    by_launcher = rank_env.launched() or "ACCELERATE_MIXED_PRECISION" in os.environ
    if by_launcher and rank_env.OWN_LAUNCHER not in os.environ and called in (parent := parent_argv()):
        words = parent
    return words[: words.index(called) + 1] if called in words else [called]


def parent_argv() -> list[str]:
    """Return the parent process's command line; empty if the system does not show it."""
    try:
        text = Path(f"/proc/{os.getppid()}/cmdline").read_text()
    except OSError:
        return []
    return text.split("\0")
