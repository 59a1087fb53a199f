"""Small tokenizers of the kinds that chat models have, made in the test."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AddedToken, PreTrainedTokenizerFast


def trl_templates() -> Path:
    """The folder of the chat templates that TRL ships, found without importing TRL."""
    spec = find_spec("trl")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "chat_templates"


_SENTENCES = [
    "What is 3 + 4? <|im_start|>user <|im_end|> <|end|> [INST] What is that? [/INST]",
    "<think> 12 + 19 is 31 </think> <answer> 31 </answer> <tool_response> ok </tool_response>",
    'The answer of the tool is {"a": 1}. end start header id',
]


_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nOPENING{% endif %}"
)
_NORMALIZERS = {
    "nfkc": normalizers.NFKC(),
    "lower": normalizers.Sequence([normalizers.Lowercase(), normalizers.NFD(), normalizers.StripAccents()]),
    "strip": normalizers.Strip(),
    "each": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
}


@cache
def _trained(kind: str) -> str:
    is_bytes = kind in ("bytes", "space", "joined")
    raw = Tokenizer(models.BPE() if is_bytes else models.BPE(byte_fallback=True, unk_token="<0x00>"))
    alphabet, base = [], [f"<0x{byte:02X}>" for byte in range(256)]
    if is_bytes:
        # Without its pattern, pieces of text are joined across spaces and line breaks.
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(
            add_prefix_space=kind == "space", use_regex=kind != "joined"
        )
        raw.decoder = decoders.ByteLevel()
        alphabet, base = pre_tokenizers.ByteLevel.alphabet(), []
    elif kind in _NORMALIZERS:
        raw.normalizer = _NORMALIZERS[kind]
    else:
        raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=kind == "first")
    if not is_bytes:
        raw.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(
        vocab_size=450, special_tokens=base, initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(_SENTENCES, trainer)
    return str(raw.to_str())


def build_tokenizer(kind: str, special: Sequence[str], **flags: Any) -> PreTrainedTokenizerFast:
    """Make a tokenizer with special tokens.

    Args:
        kind: ``bytes`` as Qwen and Llama 3 have it; ``space`` is the same with a space before a text, and
            ``joined`` joins texts across white space; ``each`` writes a space before every piece of text,
            as Llama 2; ``first`` writes one before the first, as Phi 3, whose special tokens take the
            white space after them; ``always`` and ``never`` are other schemes of SentencePiece; ``nfkc``
            replaces characters of full width; ``lower`` and ``strip`` change texts before they are tokenized.
        special: special tokens. The last one ends a text.
        flags: other attributes of the special tokens, such as ``lstrip``.
    """
    described = json.loads(_trained(kind))
    # The bytes are in the vocabulary, and no text becomes one of them.
    described["added_tokens"] = []
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(described)))
    flags = {"normalized": False, "rstrip": kind == "first", **flags}
    tokens = [AddedToken(text, special=True, **flags) for text in special]
    tokenizer.add_tokens(tokens, special_tokens=True)
    if special:
        tokenizer.eos_token = special[-1]
    return tokenizer


def build_chatml(opened: str, *, tags: Sequence[str] = (), special: bool = False) -> PreTrainedTokenizerFast:
    """Make a tokenizer whose template ends prompts with a text. Some tags are tokens."""
    tokenizer = build_tokenizer("bytes", ["<|im_start|>", *(tags if special else ()), "<|im_end|>"])
    if not special:
        tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = _CHATML.replace("OPENING", opened)
    return tokenizer
