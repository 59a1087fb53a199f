"""What tells models apart, read from the files that a trainer or a server was started with.

A run compares its own model with that of a server before it sends weights. Names, sizes and a sample of the
numbers are compared, and no hash of them: a server may have been started with a checkpoint of the run, whose
files differ. What a server has loaded since does not count, so it may hold the weights of an earlier run.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, GenerationConfig

_log = logging.getLogger(__name__)

# Number of matrices in the sample, and of numbers from one row of each.
_MATRICES, _NUMBERS = 8, 64
# Largest distance of two samples, relative to the larger one. That of unrelated models is about 1.4, and
# training changes a small part of a weight.
_RELATED = 0.5
# Entries of a configuration that do not say what a model computes: they differ after training and saving.
_OTHER = ("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache")
_OTHER_PARTS = ("drop", "token_id", "quantization", "label", "attn_implementation", "output_", "return_dict")


def describe(
    source: str, names: Sequence[str] | None = None, *, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Describe the model at ``source`` as JSON.

    Args:
        source: folder or hub name.
        names: tensors of the sample; None chooses some that the model has.
        trust_remote_code: whether code that comes with the model may run.

    Returns:
        The model's place, its configuration, its end tokens, and shape and numbers of each tensor. What
        cannot be read is left out.
    """
    description: dict[str, Any] = {"source": source, "version": transformers.__version__}
    description |= {"config": {}, "end": None, "tensors": {}}
    try:
        folder = (
            Path(source) if Path(source).is_dir() else Path(snapshot_download(source, local_files_only=True))
        )
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):
        # A server may load a model from where only its own loader reads it.
        return description
    description["config"] = dict(_flat(json.loads(config.to_json_string(use_diff=False))))
    description["end"] = _end_tokens(folder, config)
    try:
        files = _files(folder)
        for name in _choose(files) if names is None else names:
            if name in files:
                description["tensors"][name] = _sample(files[name], name)
    except (OSError, ValueError, SafetensorError) as error:
        # The loader of the server says what is wrong with a file.
        _log.warning("%s: weights are not compared: %s", source, error)
    return description


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Say in what the server's model differs from that of the run; None if they are the same model."""
    # Other versions have other defaults, and the same sizes.
    alike = ours["version"] == theirs["version"]
    for key, value in ours["config"].items():
        if (alike or type(value) is int) and theirs["config"].get(key, value) != value:
            return f"{key} is {theirs['config'][key]} there and {value} here"
    if None not in (ours["end"], theirs["end"]) and ours["end"] != theirs["end"]:
        return f"responses end with the tokens {theirs['end']} there and {ours['end']} here"
    both = [
        (tensor, theirs["tensors"][name], name)
        for name, tensor in ours["tensors"].items()
        if name in theirs["tensors"]
    ]
    for tensor, other, name in both:
        if tensor["shape"] != other["shape"]:
            return f"{name} has the shape {other['shape']} there and {tensor['shape']} here"
    numbers = [[value for pair in both for value in pair[side]["numbers"]] for side in range(2)]
    size = max(math.hypot(*side) for side in numbers)
    if math.dist(*numbers) > _RELATED * size:
        return "all sizes are equal, and its weights have nothing to do with these"
    return None


def _flat(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if key.startswith("_") or key in _OTHER or any(part in key for part in _OTHER_PARTS):
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _end_tokens(folder: Path, config: Any) -> list[int] | None:
    """Return the tokens that end a response besides that of the tokenizer."""
    try:
        listed = GenerationConfig.from_pretrained(folder).eos_token_id
    except (OSError, ValueError):
        listed = config.to_dict().get("eos_token_id")
    if listed is None:
        return None
    return sorted({listed} if isinstance(listed, int) else set(listed))


def _files(folder: Path) -> dict[str, Path]:
    """Return the names of all tensors, each with its file."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    whole = folder / "model.safetensors"
    if not whole.is_file():
        return {}
    with safe_open(whole, "pt") as file:
        return dict.fromkeys(file.keys(), whole)


def _choose(files: Mapping[str, Path]) -> list[str]:
    # Vectors of norms are alike in all models.
    names = sorted(name for name in files if name.endswith("weight") and "norm" not in name)
    return names[:: max(1, -(-len(names) // _MATRICES))]


def _sample(path: Path, name: str) -> dict[str, Any]:
    with safe_open(path, "pt") as file:
        piece = file.get_slice(name)
        shape = list(piece.get_shape())
        middle = shape[0] // 2 if shape else 0
        row = piece[middle : middle + 1] if shape else file.get_tensor(name)
        return {"shape": shape, "numbers": row.flatten()[:_NUMBERS].float().tolist()}
