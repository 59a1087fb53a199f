"""Models of known shapes with random weights and a tokenizer of bytes, made where they are used: no hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from torchrl_grpo.models import smollm2
from torchrl_grpo.models.saving import save

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TURNS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _qwen(*sizes: int, vocabulary: int = 151_936, tied: bool = True) -> PreTrainedConfig:
    return Qwen2Config(**_sizes(vocabulary, *sizes), max_position_embeddings=32_768, tie_word_embeddings=tied)


def _llama(vocabulary: int, *sizes: int, head: int, spread: float = 0.02) -> PreTrainedConfig:
    return LlamaConfig(
        **_sizes(vocabulary, *sizes),
        head_dim=head,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        initializer_range=spread,
    )


def _sizes(vocabulary: int, hidden: int, mlp: int, layers: int, heads: int, key_heads: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
    }


SHAPES = {
    # For a CPU, with the smallest heads that vLLM's kernels for CPUs take. Its weights are spread so widely
    # that answers differ from token to token.
    "tiny": _llama(512, 64, 96, 2, 2, 1, head=32, spread=0.1),
    smollm2.NAME: _llama(49_152, 576, 1536, 30, 9, 3, head=64),
    "Qwen2.5-0.5B-Instruct": _qwen(896, 4864, 24, 14, 2),
    "Qwen2.5-1.5B-Instruct": _qwen(1536, 8960, 28, 12, 2),
    "Qwen2.5-7B-Instruct": _qwen(3584, 18_944, 28, 28, 4, vocabulary=152_064, tied=False),
}


def write(folder: Path) -> dict[str, float | str]:
    """Write a model with random weights and its tokenizer: on a GPU in bfloat16, as models are published.

    Args:
        folder: folder to write, which has the name of a shape.

    Returns:
        ``billions``, the number of weights.
    """
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    config = SHAPES[folder.name]
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 2
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32
        )
    save(model, tokenizer(config.vocab_size), folder)
    return {"billions": sum(parameter.numel() for parameter in model.parameters()) / 1e9}


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes, with further tokens that no text has, up to the size of the vocabulary."""
    tokens = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"<{number}>" for number in range(len(tokens), vocabulary)]
    raw = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(list(_SPECIAL))
    bytes_only = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token=_SPECIAL[1], eos_token=_SPECIAL[2], pad_token=_SPECIAL[2]
    )
    bytes_only.chat_template = _TURNS
    return bytes_only
