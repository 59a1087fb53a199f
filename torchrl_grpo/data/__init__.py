"""Data sets: questions and their ground truth.

:func:`load` looks up ``env.dataset`` and returns the training and the held-out problems. The package does not
import torch, and imports heavy readers on first use.
"""

from __future__ import annotations

from torchrl_grpo.data.example import Example
from torchrl_grpo.data.load import load
from torchrl_grpo.data.problems import Problems

__all__ = ["Example", "Problems", "load"]
