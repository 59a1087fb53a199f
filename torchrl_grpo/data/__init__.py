"""Questions and the truths their answers are judged by. Imports no torch; heavy readers load on use.

:func:`load` is the one door: it looks up ``env.dataset`` and returns the training and the held-out problems.
"""

from __future__ import annotations

from torchrl_grpo.data.example import Example
from torchrl_grpo.data.load import DATASETS, load
from torchrl_grpo.data.problems import Problems

__all__ = ["DATASETS", "Example", "Problems", "load"]
