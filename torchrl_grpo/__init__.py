"""GRPO for language models on TorchRL, configured with Hydra."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrl_grpo.runtime.module_search import search_working_directory_last

if TYPE_CHECKING:
    from torchrl_grpo.api.trainer import GRPOTrainer

__version__ = "0.1.0"
__all__ = ["GRPOTrainer", "__version__"]

search_working_directory_last()


def __getattr__(name: str) -> Any:
    """Import the trainer when it is asked for: most modules are imported for something else."""
    if name == "GRPOTrainer":
        from torchrl_grpo.api.trainer import GRPOTrainer

        return GRPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
