"""Predict the memory that a trainer's vision tower takes beside its weights. Imports no torch."""

from __future__ import annotations

from torchrl_grpo.config import Config
from torchrl_grpo.models.shape import ModelShape
from torchrl_grpo.planning.workload import Workload

_FLOAT = 4


def trained_parameters(cfg: Config, shape: ModelShape) -> int:
    """Return the number of weights that are trained, which are those of the adapters if there are any."""
    lora = cfg.train_model.lora
    if lora.rank > 0:
        return shape.adapters(lora.rank, lora.target_modules, cfg.train_model.vision_tower)
    return shape.parameters if cfg.train_model.vision_tower else shape.text


def tower_bytes(cfg: Config, shape: ModelShape, load: Workload) -> float:
    """Return the bytes that encoding pictures takes, if all tokens of a micro-batch's prompts are theirs.

    A frozen tower holds one layer at a time, in float32. A trained one keeps its layers for the backward
    pass, or with ``train_model.gradient_checkpointing`` their inputs. The features of the pictures, for each
    token of the text model, come on top.

    Args:
        cfg: configuration; ``train_model`` is read.
        shape: shape of the model.
        load: workload.
    """
    tower = shape.tower
    if tower is None:
        return 0.0
    patches = load.prompts * tower.patches
    layer = 2 * tower.mlp + 7 * tower.hidden
    kept = 0
    if cfg.train_model.vision_tower:
        kept = tower.layers * (tower.hidden if cfg.train_model.gradient_checkpointing else layer)
    return _FLOAT * (patches * (layer + kept) + load.prompts * shape.hidden)
