"""Read a policy's responses in the forms that TorchRL's wrappers write: text, token ids or messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tensordict import TensorDictBase

from torchrl_grpo.data.episode import EpisodeRecord, EpisodeText

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
    found = tensordict.get(("text", "response"), None)
    return None if found is None else _flat(found if isinstance(found, str) else found.tolist())


def _decoded(tensordict: TensorDictBase, tokenizer: PreTrainedTokenizerBase) -> list[str] | None:
    rows = response_rows(tensordict)
    return None if rows is None else list(tokenizer.batch_decode(rows, skip_special_tokens=False))


def _last_message(tensordict: TensorDictBase) -> list[str] | None:
    flat = tensordict.reshape(-1)
    if flat.get(("history", "response"), None) is None:
        return None
    return [str(one.get(("history", "response"))[-1].content) for one in flat.unbind(0)]


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
    special token. If there is only text, the result is False.

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
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}

    def cut_off(ids: list[int]) -> bool:
        if end in ids:
            return False
        length = len(ids)
        while length and ids[length - 1] == pad:
            length -= 1
        if not length or ids[length - 1] in special:
            return False
        return not end_is_stripped if max_new_tokens is None else length >= max_new_tokens

    return [cut_off(ids) for ids in rows]


def _padded(tensordict: TensorDictBase) -> bool:
    """Whether the wrapper has padded its tokens. If it does not say so, it may have."""
    found = tensordict.get(("tokens", "padded"), None)
    while isinstance(found, list) or hasattr(found, "tolist"):
        found = found[0] if isinstance(found, list) else found.tolist()
    return found is not False


class Answered(Protocol):
    """A response: its tokens and, if it is an episode of several turns, the record of it."""

    @property
    def token_ids(self) -> list[int]:
        """The tokens."""

    @property
    def record(self) -> EpisodeRecord | None:
        """The record of an episode."""


def judged_texts(tokenizer: PreTrainedTokenizerBase, responses: Sequence[Answered]) -> list[str]:
    """Return what rewards judge: the text of each response, and of an episode the model's last message."""
    texts: list[str] = tokenizer.batch_decode([one.token_ids for one in responses], skip_special_tokens=True)
    return [
        text if one.record is None else EpisodeText(one.record.messages_of_model[-1], one.record)
        for text, one in zip(texts, responses, strict=True)
    ]
