"""A model and its tokenizer as a folder that ``from_pretrained`` reads."""

from __future__ import annotations

import shutil
from pathlib import Path

from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write both into ``folder``, for everybody whom the umask lets read."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):
        # Written for the owner's eyes only, unlike everything beside them.
        shutil.copymode(folder / "config.json", weights)
