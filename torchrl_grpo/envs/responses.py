"""What a policy answered, as TorchRL's wrappers write it: text, token ids or messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INPUT_MODES = ("text", "tokens", "history")

# What a policy that knows better than its tokens may write: bool, [P, G] or [P, G, 1].
HIT_BOUND = "hit_length_bound"


def response_texts(
    tensordict: TensorDictBase, tokenizer: PreTrainedTokenizerBase, input_mode: str
) -> list[str]:
    """The text of every response, in the order of the batch; special tokens may stand at its end.

    In the mode ``text`` that is ``("text", "response")``, in the others ``("tokens", "response")``, decoded:
    in the mode ``history`` the wrappers cut their text at the wrong place where a prompt is padded or has a
    pad token in it. Where a policy has not written the one, the other is taken, and where neither is there,
    the last message of ``("history", "response")``.

    Args:
        tensordict: what the policy returned, of any batch size.
        tokenizer: decodes.
        input_mode: one of :data:`INPUT_MODES`.

    Raises:
        RuntimeError: none of the three is there.
    """
    texts = None
    for form in ("text", "tokens") if input_mode == "text" else ("tokens", "text"):
        if texts is None:
            texts = _written_text(tensordict) if form == "text" else _decoded(tensordict, tokenizer)
    texts = _last_message(tensordict) if texts is None else texts
    if texts is not None:
        return texts
    raise RuntimeError(
        "The policy has written none of ('text', 'response'), ('tokens', 'response') and "
        f"('history', 'response'), and the environment has input_mode={input_mode!r}: give the policy the "
        "same input_mode, and generate=True"
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
    """Token ids of every response, padding included where the policy has padded; None without them."""
    flat = tensordict.reshape(-1)
    rows = flat.get(("tokens", "response"), None, as_list=True)
    return None if rows is None else [row.tolist() for row in rows]


def hit_length_bound(
    tensordict: TensorDictBase, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int | None
) -> list[bool]:
    """Which responses the length bound ended, in the order of the batch.

    A policy that knows writes :data:`HIT_BOUND`. Otherwise it is seen from ``("tokens", "response")``: a
    response that ends in a special token has ended of itself, and another one at the bound has not. With text
    alone nothing is known, and the answer is False.

    Args:
        tensordict: what the policy returned, of any batch size.
        tokenizer: its special tokens end a response.
        max_new_tokens: the bound; None judges by the end token alone, which a policy that strips it together
            with the padding has to make do without, so that nothing is known there.
    """
    known = tensordict.get(HIT_BOUND, None)
    if known is not None:
        return [bool(value) for value in known.flatten().tolist()]
    rows = response_rows(tensordict)
    if rows is None:
        return [False] * tensordict.numel()
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    pad = end if pad is None else pad
    # Wrappers that do not pad cut pad tokens off, and the end token with them where it is the same.
    end_is_cut = pad == end and not _padded(tensordict)
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}

    def cut_off(ids: list[int]) -> bool:
        if end in ids:
            return False
        length = len(ids)
        while length and ids[length - 1] == pad:
            length -= 1
        if not length or ids[length - 1] in special:
            return False
        return not end_is_cut if max_new_tokens is None else length >= max_new_tokens

    return [cut_off(ids) for ids in rows]


def _padded(tensordict: TensorDictBase) -> bool:
    found = tensordict.get(("tokens", "padded"), None)
    while isinstance(found, list) or hasattr(found, "tolist"):
        found = found[0] if isinstance(found, list) else found.tolist()
    return found is not False
