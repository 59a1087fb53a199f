"""Instruction prompts of the project's own, for training on the instruction types that IFEval checks.

:func:`compose` is the one door. Nothing here reads the benchmark: requests, topics and wordings are
the project's, so that IFEval stays an evaluation set.
"""

from __future__ import annotations

from torchrl_grpo.data.ifeval.compose import Composed, compose

__all__ = ["Composed", "compose"]
