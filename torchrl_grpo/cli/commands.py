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
        check=_check_grpo,
    )


def grpo_async() -> None:
    """Train with GRPO on Ray, collecting and optimizing at the same time."""
    main(
        run="torchrl_grpo.training.job:run_async",
        config_name="grpo_gsm8k",
        config_dir=config_dir(),
        check=_check_grpo_async,
        asynchronous=True,
    )


def sft() -> None:
    """Train on the data set's solutions: supervised fine-tuning."""
    main(
        run="torchrl_grpo.training.job:run",
        config_name="sft_gsm8k",
        config_dir=config_dir(),
        check=_check_sft,
    )


def _check_grpo(cfg: Config) -> None:
    check_method(cfg, TrainMethod.grpo)
    check_sync(cfg)


def _check_grpo_async(cfg: Config) -> None:
    check_method(cfg, TrainMethod.grpo)
    check_async(cfg)


def _check_sft(cfg: Config) -> None:
    check_method(cfg, TrainMethod.sft)
    check_sync(cfg)
