"""GRPO for language models on TorchRL, configured with Hydra."""

from __future__ import annotations

import itertools
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl_grpo.api.trainer import GRPOTrainer

__version__ = "0.1.0"
__all__ = ["GRPOTrainer", "__version__"]

# Environment variable of workers on Ray.
RAY_WORKER_VARIABLE = "TORCHRL_GRPO_RAY_WORKER"


def _search_working_directory_last() -> None:
    """Look for modules in the working directory after all others, in processes that this project starts.

    ``python -m`` and Ray let Python look there first. A user's ``math.py`` would take the place of Python's.
    """
    pairs = itertools.pairwise(sys.orig_argv)
    is_command = any(flag == "-m" and module.startswith("torchrl_grpo") for flag, module in pairs)
    if is_command or RAY_WORKER_VARIABLE in os.environ:
        here = os.getcwd()
        if sys.path[0] == here:
            sys.path.append(sys.path.pop(0))


_search_working_directory_last()


def __getattr__(name: str) -> Any:
    """Import the trainer when it is asked for: most modules are imported for something else."""
    if name == "GRPOTrainer":
        from torchrl_grpo.api.trainer import GRPOTrainer

        return GRPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
