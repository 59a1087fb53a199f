"""Small tokenizers of the kinds that chat models have, made in the test."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AddedToken, PreTrainedTokenizerFast

_SENTENCES = [
    "What is 3 + 4? <|im_start|>user <|im_end|> <|end|> [INST] What is that? [/INST]",
    "<think> 12 + 19 is 31 </think> <answer> 31 </answer> <tool_response> ok </tool_response>",
    'The answer of the tool is {"a": 1}. end start header id',
]


@cache
def _trained(kind: str) -> str:
    is_bytes = kind == "bytes"
    raw = Tokenizer(models.BPE() if is_bytes else models.BPE(byte_fallback=True, unk_token="<0x00>"))
    alphabet, base = [], [f"<0x{byte:02X}>" for byte in range(256)]
    if is_bytes:
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        raw.decoder = decoders.ByteLevel()
        alphabet, base = pre_tokenizers.ByteLevel.alphabet(), []
    elif kind == "nfkc":
        raw.normalizer = normalizers.NFKC()
    elif kind == "each":
        raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    if not is_bytes:
        raw.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(
        vocab_size=450, special_tokens=base, initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(_SENTENCES, trainer)
    return str(raw.to_str())


def build_tokenizer(kind: str, special: Sequence[str]) -> PreTrainedTokenizerFast:
    """Make a tokenizer with special tokens.

    Args:
        kind: ``bytes`` as Qwen and Llama 3 have it; ``each`` writes a space before every piece of text, as
            Llama 2; ``first`` writes one before the first, as Phi 3, whose special tokens take the white
            space after them; ``nfkc`` replaces characters of full width.
        special: special tokens. The last one ends a text.
    """
    described = json.loads(_trained(kind))
    # The bytes are in the vocabulary, and no text becomes one of them.
    described["added_tokens"] = []
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(described)))
    tokens = [AddedToken(text, special=True, normalized=False, rstrip=kind == "first") for text in special]
    tokenizer.add_tokens(tokens, special_tokens=True)
    if special:
        tokenizer.eos_token = special[-1]
    return tokenizer
