"""Problems of an OpenEnv environment, for ``env.dataset``: each is a seed of its reset."""

from __future__ import annotations

from typing import Any

from torchrl_grpo.envs.episodes.openenv.arguments import OBSERVATION

# Held-out seeds begin here, far from those of training.
_FIRST_HELD_OUT = 1_000_000


def seeds(
    split: str, size: int = 1_000, held_out: int = 100, question: str = OBSERVATION
) -> list[dict[str, Any]]:
    """Make rows with a seed each. The held-out seeds are others than those of training.

    Args:
        split: ``train`` or ``test``.
        size: number of seeds to train on.
        held_out: number of held-out seeds.
        question: what the model is asked. ``{observation}`` stands for what the environment shows at first.
    """
    first, count = (0, size) if split == "train" else (_FIRST_HELD_OUT, held_out)
    return [{"question": question, "reset": {"seed": seed}} for seed in range(first, first + count)]
