"""Warns before training if a run's updates are too small for the dtype that samples or trains."""

from __future__ import annotations

import torch
from torch import nn

from torchrl_grpo.config import Config
from torchrl_grpo.config.schema import OptimizerConfig
from torchrl_grpo.models.lora import adapted_layers
from torchrl_grpo.models.precision import lost_to_rounding, resolve_dtype
from torchrl_grpo.training.optimizer_step import learning_rate_factor

# Above this share of weights that cannot have moved by the end, a run was seen to learn nothing: the quick
# start in bfloat16 (0.69) went from 0.01 to 0.075, in float32 to 0.9.
_TOO_MANY = 0.5
# Words with which engine and trainer compute in the same 16 bits.
_SAME_FORMAT = {
    "bfloat16": "inference_model.dtype=bfloat16 train_model.autocast=bf16",
    "float16": "inference_model.dtype=float16 train_model.autocast=fp16",
}


def rounding_check_dtype(cfg: Config, device: torch.device, precision: torch.dtype) -> torch.dtype:
    """Return the dtype in which :func:`rounding_warning` estimates how many updates are lost to rounding.

    It is ``precision`` without adapters. Training computes with adapters that are not merged. They are merged
    for publications only, in float32, and then cast to the engine's dtype. Only this cast can lose an update.
    """
    return resolve_dtype(cfg.inference_model.dtype, device) if cfg.train_model.lora.rank > 0 else precision


def rounding_warning(
    model: nn.Module, dtype: torch.dtype, cfg: OptimizerConfig, total_steps: int
) -> str | None:
    """Return a warning if most updates of the run would be rounded away; None otherwise.

    The check assumes that an update moves a weight by at most about the learning rate, as Adam's do. Muon's
    are a fifth of it on average.

    Args:
        model: model before training, with weights in float32. If it is sharded, this rank's shard is checked.
        dtype: dtype in which updates must not round to zero: see :func:`rounding_check_dtype`.
        cfg: optimizer settings.
        total_steps: optimizer steps of the run.
    """
    if dtype == torch.float32:
        return None
    move = cfg.lr * sum(learning_rate_factor(step, total_steps, cfg) for step in range(total_steps))
    share = lost_to_rounding(model, dtype, move)
    if share <= _TOO_MANY:
        return None
    name = str(dtype).removeprefix("torch.")
    if adapted_layers(model):
        return (
            f"warning: what adapters can add to a weight in {total_steps} steps of optimizer.lr={cfg.lr:g} "
            f"is rounded away for {share:.0%} of the weights when they are merged for an engine in {name}: "
            "train longer, raise optimizer.lr, or write inference_model.dtype=float32"
        )
    return (
        f"warning: in all {total_steps} steps together optimizer.lr={cfg.lr:g} moves a weight at most "
        f"by {move:.1g}, which {name} rounds away for {share:.0%} of the weights: train longer, raise "
        "optimizer.lr, or write inference_model.dtype=float32 train_model.autocast=no"
    )


def uneven_rounding_warning(cfg: Config, trainer: torch.dtype, engine: torch.dtype) -> str | None:
    """Return a warning if either engine or trainer rounds weights to 16 bits, and not both; None otherwise.

    An update that the rounding swallows then reaches one of them only, so their policies move apart.

    Args:
        cfg: configuration. Adapters are not rounded in the trainer, and ``policy.proximal=trainer`` corrects
            what is apart.
        trainer: dtype of the trainer's matrix products.
        engine: dtype of the engine's weights.
    """
    apart = (trainer == torch.float32) != (engine == torch.float32)
    samples = cfg.train.method == "grpo" and cfg.train_model.lora.rank == 0
    if not apart or not samples or cfg.policy.proximal == "trainer":
        return None
    names = [str(dtype).removeprefix("torch.") for dtype in (engine, trainer)]
    coarse = next(name for name in names if name != "float32")
    return (
        f"warning: the engine computes with weights in {names[0]} and the trainer in {names[1]}, and an "
        f"update too small for {coarse} reaches only one, so their policies move apart step by step: write "
        f"{_SAME_FORMAT[coarse]}, or inference_model.dtype=float32 train_model.autocast=no"
    )
