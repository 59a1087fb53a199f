"""GRPO for language models on TorchRL, configured with Hydra."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl_grpo.api.trainer import GRPOTrainer

__version__ = "0.1.0"
__all__ = ["GRPOTrainer", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the trainer when it is asked for: most modules are imported for something else."""
    if name == "GRPOTrainer":
        from torchrl_grpo.api.trainer import GRPOTrainer

        return GRPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
