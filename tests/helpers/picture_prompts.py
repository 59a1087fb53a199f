"""Prompts with pictures for a random model, as the environment renders them."""

from __future__ import annotations

from typing import Any

from PIL.Image import Image
from tiny_vlm import picture

from torchrl_grpo.data import pictures
from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.chat import prompt_pictures, render
from torchrl_grpo.inference.protocol import PromptPictures
from torchrl_grpo.models.pictures import PictureProcessor, attach

#: Two pictures of several sizes, none, one, three, and one that differs from the third in its colors only.
SHOWN: list[list[Image]] = [
    [picture(40, 24, 1), picture(70, 50, 2)],
    [],
    [picture(30, 30, 3)],
    [picture(64, 20, 4), picture(20, 64, 5), picture(33, 47, 6)],
    [picture(30, 30, 7)],
]


def tokenizer_of(processor: Any) -> Any:
    """Return the processor's tokenizer, which renders pictures."""
    attach(processor.tokenizer, PictureProcessor(processor))
    return processor.tokenizer


def example_of(shown: list[Image], question: str = "How many circles?") -> Example:
    """Return a problem whose pictures are in the middle of its question."""
    made = tuple(pictures.from_bytes(pictures.encode(each), "here") for each in shown)
    content = f"Look: {(pictures.MARK + ' and ') * len(made)}{question}"
    return Example("pictures/1", [{"role": "user", "content": content}], pictures=made)


def prompts_of(processor: Any) -> tuple[list[list[int]], list[PromptPictures]]:
    """Return the tokens and the pictures of a prompt for each entry of :data:`SHOWN`."""
    tokenizer = tokenizer_of(processor)
    prompts, shown = [], []
    for each in SHOWN:
        example = example_of(each)
        _, tokens = render(tokenizer, example)
        given = prompt_pictures(tokenizer, example, tokens)
        assert given is not None
        prompts.append(tokens)
        shown.append(given)
    return prompts, shown
