"""Save a model and its tokenizer for ``from_pretrained``, and adapters for PEFT."""

from __future__ import annotations

import copy
import json
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel, modeling_utils
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from torchrl_grpo.errors import ModelError, first_line
from torchrl_grpo.models import lora
from torchrl_grpo.models.pictures import processor_of
from torchrl_grpo.runtime.files.direct_file import DirectFile, Written

# Held while transformers writes weights with a function of this module.
_WRITES_DIRECTLY = threading.Lock()


class Named(Protocol):
    """Lists parameters by name."""

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Return names and complete tensors."""


def save(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    weights: Mapping[str, Tensor] | None = None,
) -> dict[Path, Written]:
    """Save a model and its tokenizer to ``folder``. Of a model with adapters, only the adapters are saved.

    Args:
        model: model to save.
        tokenizer: tokenizer of the model.
        folder: existing or new folder.
        weights: complete parameters to save in place of the model's own, which may be shards.

    Returns:
        What was written to files that were summed meanwhile, see :class:`DirectFile`.
    """
    with _writing_directly(folder) as written:
        if lora.adapted_layers(model):
            lora.save_adapters(model, folder)
        else:
            _save_model(model, folder, weights)
    _save_tokenizer(tokenizer, folder)
    _open_to_all(folder)
    return written


@contextmanager
def _writing_directly(folder: Path) -> Iterator[dict[Path, Written]]:
    """Let transformers write weights into a folder with :func:`_write_weights`, and return what was written.

    Safetensors' own function holds Python's lock until all is written, so nothing could train meanwhile.
    """
    written: dict[Path, Written] = {}

    def write(tensors: dict[str, Tensor], name: str, metadata: dict[str, str] | None = None) -> None:
        # Another thread may save a model elsewhere.
        is_own = Path(name).parent == folder
        if is_own and metadata and all(tensor.dtype == torch.float32 for tensor in tensors.values()):
            written[Path(name)] = _write_weights(tensors, Path(name), metadata)
        else:
            original(tensors, name, metadata=metadata)

    with _WRITES_DIRECTLY:
        original = modeling_utils.safe_save_file
        modeling_utils.safe_save_file = write
        try:
            yield written
        finally:
            modeling_utils.safe_save_file = original


def _write_weights(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> Written:
    """Write float32 tensors as ``safetensors.torch.save_file`` does."""
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name in sorted(tensors):
        start, end = end, end + tensors[name].nbytes
        header[name] = {"dtype": "F32", "shape": list(tensors[name].shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with DirectFile(path) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in sorted(tensors):
            file.write(tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return file.written


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a tokenizer, with the processor that is attached to it."""
    tokenizer.save_pretrained(folder)
    pictures = processor_of(tokenizer)
    if pictures is not None:
        pictures.processor.save_pretrained(folder)


def _save_model(model: PreTrainedModel, folder: Path, weights: Mapping[str, Tensor] | None) -> None:
    """Save a model with its generation config as that was read. Transformers loads more than it saves."""
    # Transformers removes entries from what it is given.
    state = None if weights is None else dict(weights)
    generation_config = model.generation_config
    if generation_config is None:
        model.save_pretrained(folder, state_dict=state)
        return
    model.generation_config = GenerationConfig()
    try:
        model.save_pretrained(folder, state_dict=state)
    finally:
        model.generation_config = generation_config
    _save_generation_config(model, folder)


def _save_generation_config(model: PreTrainedModel, folder: Path) -> None:
    if model.generation_config is not None:
        model.generation_config.to_json_file(folder / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])


def save_merged(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save the merged float32 model of ``model`` and its adapters. This needs memory for a copy of it."""
    state = {name: tensor.float().cpu() for name, tensor in lora.merged_weights(model)}
    save_torch_state_dict(state, folder)
    _save_merged_parts(model, tokenizer, folder)
    _open_to_all(folder)


def _save_merged_parts(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save all of a merged model but its weights."""
    # Not model.save_pretrained(), which would write the dtype and the quantization of the base model.
    config = copy.deepcopy(model.config)
    config.dtype, config.architectures = "float32", [type(model).__name__]
    if "quantization_config" in config.to_dict():
        del config.quantization_config
    config.save_pretrained(folder)
    _save_generation_config(model, folder)
    _save_tokenizer(tokenizer, folder)


def try_out(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    trust_remote_code: bool,
    merged: bool = False,
) -> None:
    """Save and load all but the weights of a model, so that a run does not fail at its first checkpoint.

    Args:
        model: model to save later; adapters are saved as they are.
        tokenizer: tokenizer of the model.
        folder: empty folder.
        trust_remote_code: whether code that comes with the model may run.
        merged: whether :func:`save_merged` will be called, and not :func:`save`.

    Raises:
        ModelError: something cannot be saved, or not be loaded again.
    """
    try:
        if merged:
            _save_merged_parts(model, tokenizer, folder)
        elif lora.adapted_layers(model):
            lora.save_adapters(model, folder)
            _save_tokenizer(tokenizer, folder)
        else:
            _save_model(model, folder, {})
            _save_tokenizer(tokenizer, folder)
        AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            # About the disk, and not about the model.
            raise
        raise ModelError(
            f"{model.name_or_path}: what is trained could not be saved, because of a file of this model "
            f"({first_line(error)}); correct a copy of the model, and write model.name=<its folder>"
        ) from error


def _open_to_all(folder: Path) -> None:
    """Give weight files the permissions of the umask. They are written as readable by the owner only."""
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(folder / "tokenizer_config.json", weights)
