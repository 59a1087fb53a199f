"""Models with adapters, and what they amount to."""

from __future__ import annotations

from typing import Any

import torch
from batches import make_model
from torch import Tensor
from transformers import PreTrainedModel

from torchrl_grpo.config.schema import LoraConfig
from torchrl_grpo.models import lora


def adapted(
    family: str = "llama", moved: float = 0.1, dtype: torch.dtype | None = None, **settings: Any
) -> PreTrainedModel:
    """A model with adapters of rank 4; with ``moved``, after training, as it were."""
    model = make_model(family).to(dtype or torch.get_default_dtype())
    lora.add_adapters(model, LoraConfig(**{"rank": 4, "alpha": 12.0, **settings}), seed=5)
    move(model, moved)
    return model


def move(model: PreTrainedModel, size: float, seed: int = 0) -> None:
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if lora.is_adapter(name):
                p.add_(size * torch.randn(p.shape, generator=g))


def by_formula(model: PreTrainedModel, scale: float = 3.0) -> dict[str, Tensor]:
    """W + scale B A, by the names of the state alone."""
    state = {name: p.detach() for name, p in model.named_parameters()}
    weights = {}
    for name, tensor in state.items():
        if "lora_" in name:
            continue
        if ".base_layer.weight" in name:
            a, b = (state[name.replace("base_layer.weight", f"lora_{x}.default.weight")] for x in "AB")
            delta = torch.einsum("or,ri->oi", b.double(), a.double()) * scale
            transposed = "transformer.h" in name  # GPT-2
            tensor = tensor.double() + (delta.T if transposed else delta)
        weights[name.replace(".base_layer", "")] = tensor
    return weights
