"""Build the trained model from the configuration: weights, adapters and number format."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from torchrl_grpo.config import Config
from torchrl_grpo.models import loading, lora
from torchrl_grpo.models.precision import resolve_autocast, resolve_dtype
from torchrl_grpo.runtime.rng import derive_seed


def weights_source(cfg: Config, source: str, resume_from: Path | None) -> str:
    """Return the folder or hub name from which the model and the engines load their weights.

    It is the model of the resumed checkpoint, or ``source`` for a new run. It is always ``source`` with
    adapters, because the base model is frozen and a checkpoint has only the adapters.
    """
    if resume_from is None or cfg.train_model.lora.rank > 0:
        return source
    return str(resume_from / "model")


def build_model(cfg: Config, weights: str, device: torch.device, resume_from: Path | None) -> PreTrainedModel:
    """Build the trained model in float32, or with ``train_model.lora`` float32 adapters on a frozen base.

    Args:
        cfg: configuration; ``model``, ``train_model`` and ``seed`` are read.
        weights: see :func:`weights_source`.
        device: device of the model.
        resume_from: folder of a checkpoint whose adapters are loaded, or None.

    Raises:
        CheckpointError: the checkpoint's adapters do not match the model.
        ConfigError: the adapters are for layers that the model does not have.
        ModelError: the model cannot be loaded.
        TrainingStopped: memory ran out.
    """
    adapters = cfg.train_model.lora
    if adapters.rank == 0:
        return loading.load_model(
            weights,
            cfg.model,
            device,
            torch.float32,
            instead="start a new run with train_model.lora.rank=16, or with a smaller model.name",
        )
    dtype = resolve_autocast(cfg.train_model.autocast, device) or torch.float32
    if adapters.base_dtype != "auto":
        dtype = resolve_dtype(adapters.base_dtype, device)
    model = loading.load_model(
        weights,
        cfg.model,
        device,
        dtype,
        cfg.train_model.quantization,
        instead="start a new run with train_model.quantization=nf4, or with a smaller model.name",
    )
    only_text = cfg.model.pictures and not cfg.train_model.vision_tower
    lora.add_adapters(model, adapters, derive_seed(cfg.seed, "lora"), only_text)
    if resume_from is not None:
        lora.load_adapters(model, resume_from / "model")
    return model
