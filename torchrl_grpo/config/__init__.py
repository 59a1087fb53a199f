"""The typed configuration and its checks.

Nothing here imports torch, so ``--help``, ``--cfg job`` and every bad key are answered at once.
"""

from torchrl_grpo.config.parsing import parse
from torchrl_grpo.config.schema import Config

__all__ = ["Config", "parse"]
