"""Save a model and its tokenizer for ``from_pretrained``, and adapters for PEFT."""

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
        """Return names and complete tensors."""


def save(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, weights: Named | None = None
) -> None:
    """Save a model and its tokenizer to ``folder``. Of a model with adapters, only the adapters are saved.

    Args:
        model: model to save.
        tokenizer: tokenizer of the model.
        folder: existing or new folder.
        weights: source of the complete parameters, if the model itself has only shards of them.
    """
    if lora.adapted_layers(model):
        lora.save_adapters(model, folder)
    else:
        whole = None if weights in (None, model) else {n: p.cpu() for n, p in weights.named_parameters()}
        model.save_pretrained(folder, state_dict=whole)
    tokenizer.save_pretrained(folder)
    _open_to_all(folder)


def save_merged(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save the merged float32 model of ``model`` and its adapters. This needs memory for a copy of it."""
    state = {name: tensor.float().cpu() for name, tensor in lora.merged_weights(model)}
    save_torch_state_dict(state, folder)
    # Not model.save_pretrained(), which would write the dtype and the quantization of the base model.
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
    """Give weight files the permissions of the umask. They are written as readable by the owner only."""
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(folder / "tokenizer_config.json", weights)
