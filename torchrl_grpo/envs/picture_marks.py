"""Pictures in the messages and texts of prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchrl_grpo.data.example import Example
from torchrl_grpo.data.pictures import MARK
from torchrl_grpo.errors import DataError, ModelError, first_line
from torchrl_grpo.models.pictures import PictureProcessor, processor_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose text and pictures are parts, as templates for pictures expect them."""
    parts: list[dict[str, str]] = []
    for number, text in enumerate(message["content"].split(MARK)):
        if number > 0:
            parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return {**message, "content": parts}


def check_marks(
    tokenizer: PreTrainedTokenizerBase, processor: PictureProcessor, text: str, example: Example
) -> None:
    """Check that a rendered prompt has a mark for each of its pictures, and no others.

    Raises:
        ModelError: the chat template leaves pictures out, or something else wrote a mark.
    """
    marks, count = text.count(processor.mark), len(example.pictures)
    if marks != count:
        raise ModelError(
            f"The chat template of {tokenizer.name_or_path or type(tokenizer).__name__} writes {marks} times "
            f"{processor.mark} for the {count} pictures of {example.id}: give one that writes it once for "
            "each part of the type image as model.chat_template, and leave it out of env.prompt_template."
        )


def with_picture_tokens(tokenizer: PreTrainedTokenizerBase, text: str, example: Example) -> str:
    """Return a rendered prompt with the text of all tokens of its pictures in place of their marks.

    Raises:
        DataError: a picture does not suit the model.
    """
    processor = processor_of(tokenizer)
    if processor is None or not example.pictures:
        return text
    sizes = [picture.size for picture in example.pictures]
    try:
        replacements = processor.replacements(sizes)
    except ValueError as error:
        shown = ", ".join(f"{width} x {height}" for width, height in sizes)
        raise DataError(
            f"{example.id}: its pictures of {shown} pixels do not suit the model ({first_line(error)}); "
            "change their size or remove the row"
        ) from error
    before, *after = text.split(processor.mark)
    return before + "".join(f"{shown}{rest}" for shown, rest in zip(replacements, after, strict=True))
