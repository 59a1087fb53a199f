"""The three commands, ``grpo``, ``grpo-async`` and ``grpo-sft``.

The scripts of ``sota-implementations`` and the entry points of the wheel call the same functions.
"""

from __future__ import annotations

from torchrl_grpo.cli.main import Command, main
from torchrl_grpo.config.values import TrainMethod

COMMANDS = {
    "grpo": Command(),
    "grpo-async": Command("torchrl_grpo.training.job:run_async", asynchronous=True),
    "grpo-sft": Command(config_name="sft_gsm8k", method=TrainMethod.sft),
}


def grpo() -> None:
    """Train with GRPO, alternating between collection and optimization."""
    main(COMMANDS["grpo"])


def grpo_async() -> None:
    """Train with GRPO while workers, on Ray or with servers, generate at the same time."""
    main(COMMANDS["grpo-async"])


def sft() -> None:
    """Train on the data set's solutions: supervised fine-tuning."""
    main(COMMANDS["grpo-sft"])
