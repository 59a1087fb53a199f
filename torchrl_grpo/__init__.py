"""GRPO for language models on TorchRL, configured with Hydra."""

from __future__ import annotations

from torchrl_grpo.runtime.module_search import search_working_directory_last

# Before the first import of a module that a file in the working directory could replace.
search_working_directory_last()

from typing import TYPE_CHECKING, Any  # noqa: E402

from torchrl_grpo.runtime.package_versions import VERSION as __version__  # noqa: E402

if TYPE_CHECKING:
    from torchrl_grpo.api.trainer import GRPOTrainer

__all__ = ["GRPOTrainer", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the trainer when it is asked for: most modules are imported for something else."""
    if name == "GRPOTrainer":
        from torchrl_grpo.api.trainer import GRPOTrainer

        return GRPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
