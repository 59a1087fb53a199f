"""From the configuration to the model that is trained: weights, adapters, number format."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from torchrl_grpo.config import Config
from torchrl_grpo.models import loading, lora
from torchrl_grpo.models.precision import resolve_autocast, resolve_dtype
from torchrl_grpo.runtime.rng import derive_seed


def weights_source(cfg: Config, source: str, resume_from: Path | None) -> str:
    """What model and engines are loaded from: ``source``, or the model of the checkpoint that is resumed.

    A checkpoint of adapters holds no model: with them it is ``source``, whose weights are frozen.
    """
    if resume_from is None or cfg.train_model.lora.rank > 0:
        return source
    return str(resume_from / "model")


def build_model(cfg: Config, weights: str, device: torch.device, resume_from: Path | None) -> PreTrainedModel:
    """The model that is trained, in float32; with ``train_model.lora`` adapters in float32 on a frozen base.

    Args:
        cfg: ``model``, ``train_model`` and ``seed`` are read.
        weights: see :func:`weights_source`.
        device: where it runs.
        resume_from: a checkpoint whose adapters to take, or None.

    Raises:
        ConfigError: the adapters are for layers that the model does not have.
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
    lora.add_adapters(model, adapters, derive_seed(cfg.seed, "lora"))
    if resume_from is not None:
        lora.load_adapters(model, resume_from / "model")
    return model
