"""A model and its tokenizer as a folder that ``from_pretrained`` reads; adapters as one that PEFT reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from torchrl_grpo.models import lora


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write both into ``folder``, of a model with adapters these alone."""
    if lora.adapted_layers(model):
        lora.save_adapters(model, folder)
    else:
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _open_to_all(folder)


def save_merged(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the float32 model that ``model`` with its adapters amounts to; a copy of it is in memory."""
    state = {name: tensor.float().cpu() for name, tensor in lora.merged_weights(model)}
    model.save_pretrained(folder, state_dict=state)
    config = json.loads((folder / "config.json").read_text())
    # What from_pretrained loads it in; save_pretrained wrote the format of the base.
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}, indent=2) + "\n")
    tokenizer.save_pretrained(folder)
    _open_to_all(folder)


def _open_to_all(folder: Path) -> None:
    """Let everybody read whom the umask lets; weights were written for the owner's eyes only."""
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(folder / "tokenizer_config.json", weights)
