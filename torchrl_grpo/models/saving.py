"""A model and its tokenizer as a folder that ``from_pretrained`` reads; adapters as one that PEFT reads."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from torchrl_grpo.models import lora


class Named(Protocol):
    """Lists parameters by name."""

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Names and whole tensors."""


def save(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, weights: Named | None = None
) -> None:
    """Write both into ``folder``, of a model with adapters these alone.

    Args:
        model: of which architecture.
        tokenizer: its own.
        folder: where to.
        weights: lists the parameters, where the model itself holds a shard of them.
    """
    if lora.adapted_layers(model):
        lora.save_adapters(model, folder)
    else:
        whole = None if weights in (None, model) else {n: p.cpu() for n, p in weights.named_parameters()}
        model.save_pretrained(folder, state_dict=whole)
    tokenizer.save_pretrained(folder)
    _open_to_all(folder)


def save_merged(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the float32 model that ``model`` with its adapters amounts to; a copy of it is in memory."""
    state = {name: tensor.float().cpu() for name, tensor in lora.merged_weights(model)}
    save_torch_state_dict(state, folder)
    # Not save_pretrained of the model, which would write the format, and the quantization, of the base.
    config = copy.deepcopy(model.config)
    config.dtype, config.architectures = "float32", [type(model).__name__]
    if "quantization_config" in config.to_dict():
        del config.quantization_config
    config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _open_to_all(folder)


def _open_to_all(folder: Path) -> None:
    """Let everybody read whom the umask lets; weights were written for the owner's eyes only."""
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(folder / "tokenizer_config.json", weights)
