"""Read a policy's responses in the forms that TorchRL's wrappers write: text, token ids or messages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase

from torchrl_grpo.data.episode import ResponseText
from torchrl_grpo.envs.chat import after_message
from torchrl_grpo.envs.control_tokens import special_ends, special_tags
from torchrl_grpo.envs.decoding import decode
from torchrl_grpo.envs.openings import Opening, opening, opening_of_tokens
from torchrl_grpo.errors import ModelError
from torchrl_grpo.inference.protocol import Answered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INPUT_MODES = ("text", "tokens", "history")

# Optional entry of a policy that knows which responses are truncated: bool, [P, G] or [P, G, 1].
HIT_LENGTH_BOUND_KEY = "hit_length_bound"


def response_texts(
    tensordict: TensorDictBase, tokenizer: PreTrainedTokenizerBase, input_mode: str
) -> list[str]:
    """Return the text of every response, in the order of the batch. It may end with special tokens.

    The first entry that exists is used:

    * mode ``text``: ``("text", "response")``; ``("tokens", "response")``, decoded; the last message of
      ``("history", "response")``;
    * modes ``tokens`` and ``history``: ``("tokens", "response")``, decoded; ``("text", "response")``; the
      last message of ``("history", "response")``.

    In mode ``history`` tokens come first, because the wrappers cut their text in the wrong place if a prompt
    is padded or contains a pad token.

    Args:
        tensordict: output of the policy, of any batch size.
        tokenizer: tokenizer that decodes.
        input_mode: one of :data:`INPUT_MODES`.

    Raises:
        RuntimeError: all three entries are missing.
    """
    texts = None
    for source in ("text", "tokens") if input_mode == "text" else ("tokens", "text"):
        if texts is None:
            texts = _written_text(tensordict) if source == "text" else _decoded(tensordict, tokenizer)
    texts = _last_message(tensordict) if texts is None else texts
    if texts is not None:
        return texts
    raise RuntimeError(
        "The policy has written none of ('text', 'response'), ('tokens', 'response') and "
        f"('history', 'response'), and the environment has input_mode={input_mode!r}; build the policy with "
        "the same input_mode and with generate=True"
    )


def _written_text(tensordict: TensorDictBase) -> list[str] | None:
    text = tensordict.get(("text", "response"), None)
    return None if text is None else _flat(text if isinstance(text, str) else text.tolist())


def _decoded(tensordict: TensorDictBase, tokenizer: PreTrainedTokenizerBase) -> list[str] | None:
    rows = response_rows(tensordict)
    return None if rows is None else list(tokenizer.batch_decode(rows, skip_special_tokens=False))


def _last_message(tensordict: TensorDictBase) -> list[str] | None:
    flat = tensordict.reshape(-1)
    if flat.get(("history", "response"), None) is None:
        return None
    return [str(row.get(("history", "response"))[-1].content) for row in flat.unbind(0)]


def _flat(values: Any) -> list[str]:
    if isinstance(values, list):
        return [text for value in values for text in _flat(value)]
    return [str(values)]


def response_rows(tensordict: TensorDictBase) -> list[list[int]] | None:
    """Return the token ids of every response, including the policy's padding, or None if there are none."""
    flat = tensordict.reshape(-1)
    rows = flat.get(("tokens", "response"), None, as_list=True)
    return None if rows is None else [row.tolist() for row in rows]


def is_truncated(
    tensordict: TensorDictBase, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int | None
) -> list[bool]:
    """Return whether each response was truncated at the maximum length, in the order of the batch.

    A policy may write the result itself as :data:`HIT_LENGTH_BOUND_KEY`. Otherwise it is read from
    ``("tokens", "response")``: a response was truncated if it has the maximum length and does not end in a
    special token other than a tag. If there is only text, the result is False.

    Args:
        tensordict: output of the policy, of any batch size.
        tokenizer: tokenizer whose special tokens end a response.
        max_new_tokens: maximum length in tokens. With None, every response without an end token counts as
            truncated, unless the policy strips end tokens together with the padding: then the result is
            False.
    """
    known = tensordict.get(HIT_LENGTH_BOUND_KEY, None)
    if known is not None:
        return [bool(value) for value in known.flatten().tolist()]
    rows = response_rows(tensordict)
    if rows is None:
        return [False] * tensordict.numel()
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    pad = end if pad is None else pad
    # Wrappers that do not pad strip pad tokens, and so also an end token that is the pad token.
    end_is_stripped = pad == end and not _padded(tensordict)
    ends = _end_tokens(tokenizer)

    def cut_off(ids: list[int]) -> bool:
        if end in ids:
            return False
        length = len(ids)
        while length and ids[length - 1] == pad:
            length -= 1
        if not length or ids[length - 1] in ends:
            return False
        return not end_is_stripped if max_new_tokens is None else length >= max_new_tokens

    return [cut_off(ids) for ids in rows]


def _padded(tensordict: TensorDictBase) -> bool:
    """Whether the wrapper has padded its tokens. If it does not say so, it may have."""
    is_padded = tensordict.get(("tokens", "padded"), None)
    while isinstance(is_padded, list) or hasattr(is_padded, "tolist"):
        is_padded = is_padded[0] if isinstance(is_padded, list) else is_padded.tolist()
    return is_padded is not False


def note_on_reading(tokenizer: PreTrainedTokenizerBase, prompt: str) -> str | None:
    """Return a message about tags that rewards read in a special way; None if there are none.

    Args:
        tokenizer: tokenizer of the model.
        prompt: text of a prompt.
    """
    start, tags = opening(prompt), sorted(special_tags(tokenizer))
    notes = []
    if start.opened:
        notes.append(f"Prompts end with {start.opened!r}, which rewards read as the start of each response.")
    if start.block:
        notes.append(
            f"Prompts end with {start.block!r}, so responses have no thoughts, and need none for `format`."
        )
    if tags:
        notes.append(f"Rewards read the special tokens {', '.join(tags)} as text.")
    return " ".join(notes) or None


def written_texts(tokenizer: PreTrainedTokenizerBase, responses: Sequence[Answered]) -> list[str]:
    """Return what the model wrote: the text of each response, with special tokens but without its end.

    The end is the token that ended the response, padding, and special tokens with which the chat template
    ends a message, such as ``<|END_RESPONSE|>`` of Cohere. In an episode the messages of others are part of
    the text.
    """
    others = _end_tokens(tokenizer)
    after = tokenizer(_after_message(tokenizer, str(tokenizer.chat_template)), add_special_tokens=False)
    ends = {tokenizer.eos_token_id, tokenizer.pad_token_id, *others.intersection(after["input_ids"])}
    texts = []
    for response in responses:
        length = len(response.token_ids)
        # A model may have more end tokens than its tokenizer knows.
        if response.finish_reason == "stop" and length and response.token_ids[-1] in others:
            length -= 1
        while length and response.token_ids[length - 1] in ends:
            length -= 1
        texts.append(decode(tokenizer, response.token_ids[:length]))
    return texts


@lru_cache(maxsize=4)
def _after_message(tokenizer: PreTrainedTokenizerBase, chat_template: str) -> str:
    """Return what the chat template writes after a message; nothing if it renders none of the assistant."""
    try:
        return after_message(tokenizer) if tokenizer.chat_template else ""
    except (ModelError, TypeError):
        return ""


def _end_tokens(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    return {*tokenizer.convert_tokens_to_ids(sorted(special_ends(tokenizer)))}


def judged_texts(
    tokenizer: PreTrainedTokenizerBase,
    responses: Sequence[Answered],
    prompts: Sequence[Sequence[int]] | None = None,
    texts: Sequence[str] | None = None,
) -> list[ResponseText]:
    """Return what rewards judge: the text of each response, and of an episode the model's last message.

    Args:
        tokenizer: tokenizer that decodes.
        responses: the responses.
        prompts: token ids of the prompt of each response. What a prompt has opened is part of the text.
            Without them, nothing is.
        texts: result of :func:`written_texts`; None decodes the responses.
    """
    texts = written_texts(tokenizer, responses) if texts is None else texts
    starts = [Opening()] * len(texts)
    if prompts is not None:
        # The responses of a group share the list of their prompt.
        different = {id(prompt): prompt for prompt in prompts}
        known = {number: opening_of_tokens(tokenizer, prompt) for number, prompt in different.items()}
        starts = [known[id(prompt)] for prompt in prompts]
    return [
        ResponseText(start.opened + text, start.block)
        if response.record is None
        else ResponseText(response.record.messages_of_model[-1], response.record.block, response.record)
        for text, response, start in zip(texts, responses, starts, strict=True)
    ]
