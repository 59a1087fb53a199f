"""Texts of responses are to the byte those of the tokenizer, which joins bytes or does more."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from tiny_tokenizers import build_tokenizer
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from torchrl_grpo.envs.decoding import _contents, decode

# Of bytes and of no bytes, which decoding treats differently, and with a character that stands for a byte.
_ADDED = ["<|end|>", "<tool call>", "née", "Ġ", "▁x", "ガ", "\n"]


def byte_level() -> PreTrainedTokenizerFast:
    tokenizer = build_tokenizer("bytes", ["<|im_end|>"])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in _ADDED])
    return tokenizer


class Shouting(PreTrainedTokenizerFast):
    def _decode(self, *args: Any, **options: Any) -> str:
        return str(super()._decode(*args, **options)).upper()


def shouting() -> PreTrainedTokenizerFast:
    return Shouting(tokenizer_object=byte_level().backend_tokenizer)


def cleaning(**options: bool) -> PreTrainedTokenizerFast:
    backend = byte_level().backend_tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True, **options)


def forced_to_clean() -> PreTrainedTokenizerFast:
    return cleaning(clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True)


def assert_equal(tokenizer: PreTrainedTokenizerFast) -> None:
    draw, size = random.Random(0), len(tokenizer)
    rows = [[], [0], *([token] for token in range(size - 20, size + 3))]
    # Most are no UTF-8, and end in the middle of a character.
    rows += [[draw.randrange(size + 3) for _ in range(draw.randrange(1, 40))] for _ in range(1_000)]
    texts = [tokenizer.decode(row, skip_special_tokens=False) for row in rows]
    assert [decode(tokenizer, row) for row in rows] == texts
    assert any("\ufffd" in text for text in texts)


@pytest.mark.parametrize(
    ("build", "joins"),
    [
        (byte_level, True),
        (shouting, False),
        (cleaning, True),
        (forced_to_clean, False),
        (lambda: build_tokenizer("first", ["<|im_end|>"]), False),
    ],
)
def test_texts_are_those_of_the_tokenizer(build: Callable[[], PreTrainedTokenizerFast], joins: bool) -> None:
    tokenizer = build()
    assert (_contents(tokenizer) is not None) == joins
    assert_equal(tokenizer)


def test_tokens_may_be_added_later() -> None:
    tokenizer = byte_level()
    assert decode(tokenizer, [len(tokenizer)]) == ""
    tokenizer.add_tokens(["later"])
    assert decode(tokenizer, [len(tokenizer) - 1]) == "later"
