"""The three commands, ``grpo``, ``grpo-async`` and ``grpo-sft``.

The scripts of ``sota-implementations`` and the entry points of the wheel call the same functions.
"""

from __future__ import annotations

from torchrl_grpo.cli.main import main
from torchrl_grpo.config import Config
from torchrl_grpo.config.checks.schedule import check_async, check_method, check_sync
from torchrl_grpo.config.values import TrainMethod
from torchrl_grpo.runtime.config_dir import config_dir


def grpo() -> None:
    """Train with GRPO, alternating between collection and optimization."""
    main(
        run="torchrl_grpo.training.job:run",
        config_name="grpo_gsm8k",
        config_dir=config_dir(),
        check=lambda cfg: check_job(cfg, asynchronous=False, method=TrainMethod.grpo),
    )


def grpo_async() -> None:
    """Train with GRPO while workers, on Ray or with servers, generate at the same time."""
    main(
        run="torchrl_grpo.training.job:run_async",
        config_name="grpo_gsm8k",
        config_dir=config_dir(),
        check=lambda cfg: check_job(cfg, asynchronous=True, method=TrainMethod.grpo),
        asynchronous=True,
    )


def sft() -> None:
    """Train on the data set's solutions: supervised fine-tuning."""
    main(
        run="torchrl_grpo.training.job:run",
        config_name="sft_gsm8k",
        method=TrainMethod.sft,
        config_dir=config_dir(),
        check=lambda cfg: check_job(cfg, asynchronous=False, method=TrainMethod.sft),
    )


def check_job(cfg: Config, asynchronous: bool, method: TrainMethod) -> None:
    """Check what a command requires beyond :func:`~torchrl_grpo.config.checks.validate`.

    Args:
        cfg: validated configuration.
        asynchronous: whether workers sample while the trainer trains.
        method: what the command learns from.

    Raises:
        ConfigError: the configuration is for another command, or keys contradict each other.
    """
    check_method(cfg, method)
    (check_async if asynchronous else check_sync)(cfg)
