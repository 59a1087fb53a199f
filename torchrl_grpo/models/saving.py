"""A model and its tokenizer as a folder that ``from_pretrained`` reads."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase


class Named(Protocol):
    """Lists parameters by name."""

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Names and whole tensors."""


def save(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, weights: Named | None = None
) -> None:
    """Write both into ``folder``, for everybody whom the umask lets read.

    Args:
        model: of which architecture.
        tokenizer: its own.
        folder: where to.
        weights: lists the parameters, where the model itself holds a shard of them.
    """
    whole = None if weights in (None, model) else {n: p.cpu() for n, p in weights.named_parameters()}
    model.save_pretrained(folder, state_dict=whole)
    tokenizer.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        # Written for the owner's eyes only, unlike everything beside them.
        shutil.copymode(folder / "config.json", file)
