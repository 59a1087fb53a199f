"""Render a problem to the text and token ids of its prompt with the tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from jinja2.exceptions import TemplateError

from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.control_tokens import Message, control_tokens, visible
from torchrl_grpo.envs.picture_marks import check_marks, in_parts, with_picture_tokens
from torchrl_grpo.errors import DataError, ModelError, first_line
from torchrl_grpo.inference.protocol import PromptPictures
from torchrl_grpo.models.pictures import processor_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def render_marked(tokenizer: PreTrainedTokenizerBase, example: Example, reply: str | None = None) -> str:
    """Render a prompt up to the start of the response, with the marks of ``ControlTokens``.

    Args:
        tokenizer: a Hugging Face tokenizer.
        example: the problem.
        reply: message of the assistant, which then ends the text.

    Raises:
        ModelError: there is no template, or it cannot render the messages.
    """
    if not tokenizer.chat_template:
        raise ModelError(
            f"The tokenizer of {tokenizer.name_or_path or type(tokenizer).__name__} has no chat template: "
            "give one as model.chat_template (Jinja), or choose an instruct model as model.name."
        )

    end = [] if reply is None else [{"role": "assistant", "content": reply}]
    processor = processor_of(tokenizer)
    messages: list[Message] = [*example.messages]
    if processor is not None:
        messages = [in_parts(message) for message in messages]
        end = [in_parts(message) for message in end]

    def render_messages(messages: Sequence[Message]) -> str:
        return str(
            tokenizer.apply_chat_template(
                [*messages, *end],
                tools=example.tools or None,
                tokenize=False,
                add_generation_prompt=reply is None,
            )
        )

    control = control_tokens(tokenizer)
    try:
        text = control.render(render_messages, messages, example.trusted)
    except (TemplateError, TypeError) as error:
        # A template for text alone may take a message in parts for a text, which is a TypeError.
        if isinstance(error, TypeError) and processor is None:
            raise
        roles = ", ".join(message["role"] for message in [*example.messages, *end])
        raise ModelError(
            f"The chat template of {tokenizer.name_or_path or type(tokenizer).__name__} refuses messages of "
            f"the roles {roles}: {first_line(error)}; give another one as model.chat_template, or set "
            "env.system_prompt=null if it does not support a system message"
        ) from error
    if processor is not None and reply is None:
        check_marks(tokenizer, processor, text, example)
    return text


def render_text(tokenizer: PreTrainedTokenizerBase, example: Example) -> str:
    """Render the text of a prompt, as :func:`render` does."""
    return visible(render_marked(tokenizer, example))


def check_contents(tokenizer: PreTrainedTokenizerBase, example: Example) -> None:
    """Refuse a chat template that leaves out what is said to the model, as some do with texts or with roles.

    Args:
        tokenizer: a Hugging Face tokenizer.
        example: problem whose roles are tried. What the assistant has said may be left out.

    Raises:
        ModelError: the template leaves out a text, or cannot render the messages.
    """
    words = [f"zqx{number}xqz" for number in range(len(example.messages))]
    messages = [{**message, "content": word} for message, word in zip(example.messages, words, strict=True)]
    text = render_text(tokenizer, replace(example, messages=messages, pictures=()))
    for message, word in zip(messages, words, strict=True):
        if message["role"] != "assistant" and word not in text:
            raise ModelError(
                f"The chat template of {tokenizer.name_or_path or type(tokenizer).__name__} leaves out the "
                f"text of messages of the role {message['role']}, so the model would not read it; give "
                "another one as model.chat_template, or set env.system_prompt=null if it does not support "
                "a system message"
            )


def prompt_pictures(
    tokenizer: PreTrainedTokenizerBase, example: Example, token_ids: Sequence[int]
) -> PromptPictures | None:
    """Return the pictures of a prompt for an engine; None if the tokenizer renders text alone.

    Args:
        tokenizer: a Hugging Face tokenizer.
        example: the problem.
        token_ids: tokens of the prompt, see :func:`render`.

    Raises:
        DataError: the file of a picture has changed or cannot be read.
        ModelError: the template cannot render the messages.
    """
    processor = processor_of(tokenizer)
    if processor is None:
        return None
    written = control_tokens(tokenizer).ids([render_marked(tokenizer, example)])[0]
    files = tuple(picture.read() for picture in example.pictures)
    return PromptPictures(files, tuple(written), len(token_ids), processor.blocked)


def render(tokenizer: PreTrainedTokenizerBase, example: Example) -> tuple[str, list[int]]:
    """Render a prompt as text and as token ids, up to the start of the assistant's response.

    Args:
        tokenizer: a Hugging Face tokenizer.
        example: the problem; its messages, tools and trusted texts are read.

    Returns:
        The text, including the text of special tokens, and its token ids. A picture has one mark in the text,
        and all of its tokens.

    Raises:
        DataError: a picture does not suit the model.
        ModelError: there is no template, or it cannot render the messages.
    """
    text = render_marked(tokenizer, example)
    # The template writes all special tokens, so the tokenizer must not add another one.
    return visible(text), control_tokens(tokenizer).ids([with_picture_tokens(tokenizer, text, example)])[0]


def after_message(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text that the chat template writes after the content of a last message of the assistant.

    Raises:
        ModelError: the template cannot render such a message, or leaves it out.
    """
    answer = "zqxanswerxqz"
    messages: list[Message] = [{"role": "user", "content": "-"}, {"role": "assistant", "content": answer}]
    if processor_of(tokenizer) is not None:
        messages = [in_parts(message) for message in messages]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except TemplateError as error:
        raise ModelError(
            f"The chat template of {tokenizer.name_or_path} refuses a message of the assistant: "
            f"{first_line(error)}; give another one as model.chat_template"
        ) from error
    _, content, after = text.rpartition(answer)
    if not content:
        raise ModelError(
            f"The chat template of {tokenizer.name_or_path} leaves out the text of the assistant's messages; "
            "give another one as model.chat_template"
        )
    return after


def end_of_message(tokenizer: PreTrainedTokenizerBase, end_token_ids: Sequence[int]) -> int:
    """Return the token with which the chat template ends a message of the assistant.

    Args:
        tokenizer: a Hugging Face tokenizer.
        end_token_ids: tokens that end a response.

    Returns:
        The first of the end tokens that follows such a message. If the template writes none, the tokenizer's
        own end token.

    Raises:
        ModelError: the template cannot render such a message, or the engine does not stop at that token.
    """
    text = after_message(tokenizer)
    after = tokenizer(text, add_special_tokens=False)["input_ids"]
    token = next((token_id for token_id in after if token_id in end_token_ids), tokenizer.eos_token_id)
    if token not in end_token_ids:
        raise ModelError(
            f"The chat template of {tokenizer.name_or_path} ends a message with no token at which the engine "
            f"stops ({', '.join(map(str, end_token_ids))}); give another one as model.chat_template"
        )
    return int(token)


def check_length(example: Example, length: int, max_prompt_tokens: int) -> None:
    """Reject a prompt that leaves no room for its response.

    Args:
        example: problem of the prompt, for the message.
        length: length of the prompt in tokens.
        max_prompt_tokens: longest allowed prompt in tokens.

    Raises:
        DataError: the prompt is too long.
    """
    if length > max_prompt_tokens and example.pictures:
        raise DataError(
            f"The prompt of {example.id} has {length} tokens with those of its {len(example.pictures)} "
            f"pictures, and at most {max_prompt_tokens} fit; make the pictures smaller, drop such problems "
            "with env.overlong_prompts=drop, or raise inference_model.max_model_len or lower "
            "inference_model.max_new_tokens in a new run"
        )
    if length > max_prompt_tokens:
        raise DataError(
            f"The prompt of {example.id} has {length} tokens, and at most {max_prompt_tokens} fit; cut such "
            "prompts with env.overlong_prompts=truncate_right, which also works when resuming; or drop them "
            "with env.overlong_prompts=drop, if the data set is not generated; or raise "
            "inference_model.max_model_len or lower inference_model.max_new_tokens in a new run"
        )


def lengths_above(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], bound: int
) -> dict[int, int]:
    """Find the prompts that are longer than a bound.

    A token covers at least one byte. So a prompt with at most ``bound`` bytes need not be tokenized, and ten
    thousand ordinary prompts take about a second.

    Args:
        tokenizer: a Hugging Face tokenizer.
        examples: problems whose prompts are measured.
        bound: longest allowed prompt in tokens.

    Returns:
        Index of the example -> length of its prompt in tokens, in the order of the examples.

    Raises:
        ModelError: there is no template, or it cannot render an example.
    """
    texts = {}
    for number, example in enumerate(examples):
        text = with_picture_tokens(tokenizer, render_marked(tokenizer, example), example)
        if len(text.encode(errors="replace")) > bound:
            texts[number] = text
    lengths = [len(ids) for ids in control_tokens(tokenizer).ids([*texts.values()])]
    return {number: length for number, length in zip(texts, lengths, strict=True) if length > bound}


def check_lengths(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], max_prompt_tokens: int
) -> None:
    """Reject data with a prompt that is too long at the start of a run, not when it is drawn hours later.

    Args:
        tokenizer: a Hugging Face tokenizer.
        examples: all problems that may be drawn.
        max_prompt_tokens: longest allowed prompt in tokens.

    Raises:
        DataError: a prompt is too long.
        ModelError: there is no template, or it cannot render an example.
    """
    for number, length in lengths_above(tokenizer, examples, max_prompt_tokens).items():
        check_length(examples[number], length, max_prompt_tokens)
