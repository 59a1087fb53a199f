"""Composed prompts for training on the instruction types that IFEval checks.

:func:`compose` creates them from requests, topics and wordings that this project wrote. They contain no text
of the benchmark, so IFEval stays an evaluation set.
"""

from __future__ import annotations

from torchrl_grpo.data.ifeval.compose import Composed, compose

__all__ = ["Composed", "compose"]
