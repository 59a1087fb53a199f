"""The two commands, ``grpo`` and ``grpo-async``.

The scripts of ``sota-implementations/grpo`` and the entry points of the wheel call the same functions.
"""

from __future__ import annotations

from torchrl_grpo.cli.main import main
from torchrl_grpo.config.checks.schedule import check_async, check_sync
from torchrl_grpo.runtime.config_dir import config_dir


def grpo() -> None:
    """Train with GRPO, alternating between collection and optimization."""
    main(
        run="torchrl_grpo.training.job:run",
        config_name="grpo_gsm8k",
        config_dir=config_dir(),
        check=check_sync,
    )


def grpo_async() -> None:
    """Train with GRPO on Ray, collecting and optimizing at the same time."""
    main(
        run="torchrl_grpo.training.job:run_async",
        config_name="grpo_gsm8k",
        config_dir=config_dir(),
        check=check_async,
        asynchronous=True,
    )
