"""Texts that a tokenizer makes control tokens of, such as the one that ends a turn, and how to break them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Those that families of chat models use, for a model whose tokenizer is not known: ``<|im_end|>``,
#: ``<turn|>``, ``[|user|]``, ``<start_of_turn>``, ``</s>``, ``<<SYS>>``, ``[/INST]``.
USUAL = re.compile(
    r"<[|｜][^\s<>]{1,64}>|<[^\s<>]{1,64}[|｜]>|\[\|\w{1,32}\|\]"
    r"|</?(?:s|[bes]o[stp]|pad|unk|role|(?:start|end)_of_\w{1,32}|unused\d+|reserved_\d+|special_\d+)>"
    r"|<</?SYS>>|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_\w{1,32}|BOS|EOS|[gs]MASK)\]",
    re.IGNORECASE,
)


def control_texts(tokenizer: PreTrainedTokenizerBase, chat_template: str) -> frozenset[str]:
    """Return the texts of a tokenizer's special tokens, and of added ones that the chat template has.

    Args:
        tokenizer: a Hugging Face tokenizer.
        chat_template: Jinja text.
    """
    # A single character cannot be broken.
    added = [token for token in tokenizer.added_tokens_decoder.values() if len(token.content.strip()) > 1]
    # A template also has words and line breaks that it does not write as tokens.
    return frozenset(
        token.content
        for token in added
        if token.special or (re.search(r"[^\w\s]", token.content) and token.content in chat_template)
    )


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of any of the texts, which prefers longer ones as tokenizers do."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def broken(text: str, pattern: re.Pattern[str], mark: str) -> str:
    """Return a text with a mark behind the first character of whatever the pattern matches."""
    # Once is not enough for tokens that overlap.
    while pattern.search(text):
        text = pattern.sub(lambda match: match[0][0] + mark + match[0][1:], text)
    return text
