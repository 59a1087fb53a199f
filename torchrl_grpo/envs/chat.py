"""Chat messages to the text and token ids that a model continues, by the tokenizer's own template.

Left out: multi-turn bookkeeping and tools.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jinja2.exceptions import TemplateError

from torchrl_grpo.data.example import Example
from torchrl_grpo.errors import DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def render_text(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]], chat_template: str | None = None
) -> str:
    """The prompt's text up to where the assistant's answer begins.

    Args:
        tokenizer: a Hugging Face tokenizer.
        messages: ``[{"role": ..., "content": ...}, ...]``.
        chat_template: Jinja text in place of the tokenizer's own template.

    Returns:
        The text, special tokens written out.

    Raises:
        ModelError: there is no template, or it cannot render these messages.
    """
    if chat_template is None and not tokenizer.chat_template:
        raise ModelError(
            f"The tokenizer of {tokenizer.name_or_path or type(tokenizer).__name__} has no chat template: "
            "give one as model.chat_template (Jinja), or choose an instruct model as model.name."
        )
    try:
        text = tokenizer.apply_chat_template(
            list(messages), chat_template=chat_template, tokenize=False, add_generation_prompt=True
        )
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ModelError(
            f"The chat template of {tokenizer.name_or_path or type(tokenizer).__name__} refuses messages of "
            f"the roles {roles}: {error}. Give another one as model.chat_template; where it takes no system "
            "message, set env.system_prompt=null."
        ) from error
    return str(text)


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]], chat_template: str | None = None
) -> tuple[str, list[int]]:
    """The prompt as text and as token ids.

    Args:
        tokenizer: a Hugging Face tokenizer.
        messages: ``[{"role": ..., "content": ...}, ...]``.
        chat_template: Jinja text in place of the tokenizer's own template.

    Returns:
        The text, and its token ids.

    Raises:
        ModelError: there is no template, or it cannot render these messages.
    """
    text = render_text(tokenizer, messages, chat_template)
    # The template has written every special token itself; the tokenizer must not add a second one.
    return text, list(tokenizer(text, add_special_tokens=False)["input_ids"])


def check_length(example: Example, length: int, max_prompt_tokens: int) -> None:
    """Refuses a prompt that leaves no room for its answer.

    Args:
        example: whose prompt it is.
        length: its tokens.
        max_prompt_tokens: the bound.

    Raises:
        DataError: the prompt is longer than the bound.
    """
    if length > max_prompt_tokens:
        raise DataError(
            f"The prompt of {example.id} has {length} tokens, and at most {max_prompt_tokens} fit: let such "
            "prompts be cut (env.overlong_prompts=truncate_right, also of a run that is resumed) or, of a "
            "data set of rows, left out (drop), or in a new run raise inference_model.max_model_len or "
            "lower inference_model.max_new_tokens."
        )


def lengths_above(
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    bound: int,
    chat_template: str | None = None,
) -> dict[int, int]:
    """The prompts that are longer than a bound.

    A prompt of no more bytes than the bound has tokens is not tokenized: a token stands for a byte at
    the least. That makes ten thousand ordinary prompts a matter of a second.

    Args:
        tokenizer: a Hugging Face tokenizer.
        examples: whose prompts they are.
        bound: in tokens.
        chat_template: as for :func:`render`.

    Returns:
        The example's number, from 0, to its prompt's tokens; in the examples' order.

    Raises:
        ModelError: there is no template, or it cannot render an example.
    """
    texts = {}
    for number, example in enumerate(examples):
        text = render_text(tokenizer, example.messages, chat_template)
        if len(text.encode(errors="replace")) > bound:
            texts[number] = text
    if not texts:
        return {}
    # In one call: a tokenizer in Rust divides it among the cores.
    lengths = [len(ids) for ids in tokenizer([*texts.values()], add_special_tokens=False)["input_ids"]]
    return {number: length for number, length in zip(texts, lengths, strict=True) if length > bound}


def check_lengths(
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    max_prompt_tokens: int,
    chat_template: str | None = None,
) -> None:
    """Refuses data with a prompt that is too long, before hours of training come to it.

    Args:
        tokenizer: a Hugging Face tokenizer.
        examples: all that may be drawn.
        max_prompt_tokens: the bound.
        chat_template: as for :func:`render`.

    Raises:
        DataError: a prompt is longer than the bound.
        ModelError: there is no template, or it cannot render an example.
    """
    for number, length in lengths_above(tokenizer, examples, max_prompt_tokens, chat_template).items():
        check_length(examples[number], length, max_prompt_tokens)
