"""The text and the tokens of a solution, as the chat template writes it after its prompt.

Prompt and solution are tokenized as one text, and the tokens are cut where the solution begins. Apart from
each other, some tokenizers write a space before both, or a line break that a token of the template takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.chat import after_message, render_marked
from torchrl_grpo.envs.control_tokens import control_tokens, visible
from torchrl_grpo.envs.openings import opening
from torchrl_grpo.envs.picture_marks import with_picture_tokens
from torchrl_grpo.errors import DataError
from torchrl_grpo.models.pictures import processor_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Solutions that are tokenized in one call.
_BATCH = 1000


@dataclass(frozen=True)
class Solution:
    """What a model has to write after a prompt.

    Attributes:
        text: the text, without the token that ends a message.
        tokens: the tokens, with that token.
        is_shortened: whether thoughts are left out, because the prompt has closed its own.
    """

    text: str
    tokens: list[int]
    is_shortened: bool


@dataclass(frozen=True)
class _Texts:
    """Texts of a prompt and of what follows it, with marks."""

    prompt: str
    written: str
    end: str
    is_shortened: bool


def solutions(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], end_token_id: int
) -> Iterator[Solution]:
    """Yield what a model has to write after the prompt of each problem.

    Args:
        tokenizer: a Hugging Face tokenizer.
        examples: problems with solutions.
        end_token_id: token that ends a message.

    Raises:
        DataError: a token covers the end of a prompt and the start of its solution, a prompt begins thoughts
            that its solution does not end, or a solution has a token that stands for pictures.
        ModelError: the chat template cannot render a message of the assistant.
    """
    control = control_tokens(tokenizer)
    added = tokenizer.added_tokens_decoder.get(end_token_id)
    end = "" if added is None else str(added.content)
    after = after_message(tokenizer)
    processor = processor_of(tokenizer)
    blocked = frozenset(() if processor is None else processor.blocked)
    for start in range(0, len(examples), _BATCH):
        batch = examples[start : start + _BATCH]
        rendered = [_texts(tokenizer, example, after, end) for example in batch]
        shown = [
            with_picture_tokens(tokenizer, texts.prompt, example)
            for example, texts in zip(batch, rendered, strict=True)
        ]
        prompts = control.ids(shown)
        wholes = control.ids(
            [text + texts.written + texts.end for text, texts in zip(shown, rendered, strict=True)]
        )
        for example, texts, prompt, whole in zip(batch, rendered, prompts, wholes, strict=True):
            if whole[: len(prompt)] != prompt:
                raise _cut_error(tokenizer, example, prompt, whole)
            # An end token that is no added one has no text of its own.
            tokens = whole[len(prompt) :] + ([end_token_id] if added is None else [])
            if tokens[-1] != end_token_id:
                raise DataError(
                    f"train.method=sft: the tokenizer does not find the end token {texts.end.strip()} after "
                    f"the solution of {example.id}; end solutions with other characters, or give another "
                    "template as model.chat_template"
                )
            if not blocked.isdisjoint(tokens):
                raise DataError(
                    f"train.method=sft: the solution of {example.id} has a token that stands for a picture, "
                    "which no response may have; remove it, or write env.control_tokens_in_data=false"
                )
            yield Solution(visible(texts.written), tokens, texts.is_shortened)


def _texts(tokenizer: PreTrainedTokenizerBase, example: Example, after: str, end: str) -> _Texts:
    """Return the texts of a problem.

    Args:
        tokenizer: a Hugging Face tokenizer.
        example: the problem.
        after: what the chat template writes after a message of the assistant.
        end: text of the token that ends one.
    """
    control = control_tokens(tokenizer)
    prompt = render_marked(tokenizer, example)
    start = opening(visible(prompt))
    rest = start.continued(example.solution)
    own_end = (after.partition(end)[0] if end and end in after else "") + end
    is_shortened = bool(start.block) and "</think>" in example.solution and "</think>" not in rest
    written = control.solution(rest, example.trusted)
    # A template may move thoughts, and so go on from its prompt only if it sees all of them.
    for text in dict.fromkeys((example.solution, rest)):
        whole = render_marked(tokenizer, example, reply=control.solution(text, example.trusted))
        continued = whole.removeprefix(prompt).removesuffix(after)
        is_continued = whole == prompt + continued + after
        is_repeated = any(continued.lstrip().startswith(tag) for tag in start.tags)
        # Some templates take the thoughts out of all messages.
        if is_continued and not is_repeated and _letters(rest) in _letters(continued):
            written = continued
            break
    for tag, closing in start.pairs:
        if closing not in written:
            raise DataError(
                f"train.method=sft: the chat template ends the prompt of {example.id} with {tag}, and the "
                f"solution has no {closing}; write solutions with both, or give another template as "
                "model.chat_template"
            )
    return _Texts(prompt, written, own_end, is_shortened)


def _letters(text: str) -> str:
    return "".join(visible(text).casefold().split())


def _cut_error(
    tokenizer: PreTrainedTokenizerBase, example: Example, prompt: Sequence[int], whole: Sequence[int]
) -> DataError:
    different = [at for at, pair in enumerate(zip(prompt, whole, strict=False)) if pair[0] != pair[1]]
    token = tokenizer.decode(whole[different[0] : different[0] + 1]) if different else ""
    return DataError(
        f"train.method=sft: the solution of {example.id} does not begin a token after its prompt: the token "
        f"{token!r} covers the end of the prompt too. Let solutions begin with other characters, for example "
        "without white space, or give another template as model.chat_template"
    )
