"""A stand-in for flash-attention's kernel for variable lengths, which exists for GPUs only.

It has the arguments of PyTorch's operators and refuses what they refuse, but it takes float32 and float64 as
well. One sequence at a time, it computes in float64 with a mask that is written out. Its backward pass
uses the output and the log-sum-exp that it is given, as the kernel does, and does not compute them anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    most_queries: int,
    most_keys: int,
    dropout: float,
    causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **others: Any,
) -> tuple[Tensor, ...]:
    """``aten::_flash_attention_forward``, with cumulative lengths and without dropout."""
    assert not dropout and not return_debug_mask and not any(x is not None for x in others.values())
    out = torch.full_like(query, torch.nan)
    lse = torch.full((query.shape[1], query.shape[0]), torch.nan, dtype=_lse_dtype(query))
    for queries, keys, scores in _scores(
        (query, key, value), (query_starts, key_starts), (most_queries, most_keys), causal, scale,
        (window_size_left, window_size_right),
    ):  # fmt: skip
        lse[:, queries] = scores.logsumexp(-1).to(lse.dtype)
        values = _by_head(value[keys]).repeat_interleave(query.shape[1] // value.shape[1], 0)
        out[queries] = (scores.softmax(-1) @ values).transpose(0, 1).to(out.dtype)
    state = torch.empty(2, dtype=torch.uint64)
    return out, lse, state, torch.empty(0, dtype=torch.uint64), torch.empty(0)


def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    most_queries: int,
    most_keys: int,
    dropout: float,
    causal: bool,
    state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten::_flash_attention_backward``, with cumulative lengths and without dropout."""
    assert not dropout and state.dtype == torch.uint64
    assert gradient.dtype == out.dtype == query.dtype and gradient.shape == out.shape == query.shape
    # The kernel reads these by number of heads and tokens, whatever their strides are.
    assert lse.dtype == _lse_dtype(query) and lse.is_contiguous() and lse.shape == query.shape[1::-1]
    by_query, by_key, by_value = (torch.zeros(x.shape, dtype=torch.float64) for x in (query, key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    shared = query.shape[1] // key.shape[1]
    for queries, keys, scores in _scores(
        (query, key, value), (query_starts, key_starts), (most_queries, most_keys), causal, scale,
        (window_size_left, window_size_right),
    ):  # fmt: skip
        shares = (scores - lse[:, queries, None].double()).exp()
        above, its_out = _by_head(gradient[queries]), _by_head(out[queries])
        k, v = (_by_head(x[keys]).repeat_interleave(shared, 0) for x in (key, value))
        by_scores = factor * shares * (above @ v.mT - (above * its_out).sum(-1, keepdim=True))
        by_query[queries] = (by_scores @ k).transpose(0, 1)
        for total, part in (
            (by_key, by_scores.mT @ _by_head(query[queries])),
            (by_value, shares.mT @ above),
        ):
            total[keys] = part.unflatten(0, (-1, shared)).sum(1).transpose(0, 1)
    return by_query.to(query.dtype), by_key.to(key.dtype), by_value.to(value.dtype)


def _scores(
    tensors: tuple[Tensor, Tensor, Tensor],
    starts: tuple[Tensor, Tensor],
    most: tuple[int, int],
    causal: bool,
    scale: float | None,
    window: tuple[int | None, int | None],
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield queries, keys and float64 scores ``[heads, queries, keys]``, with -inf on hidden keys."""
    query, key, value = tensors
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError("query and key must have the same dtype")
    if query.shape[-1] % 8 or query.shape[-1] > 256:
        raise RuntimeError("head_size must be a multiple of 8, and at most 256")
    if value.shape != key.shape or query.shape[1] % key.shape[1]:
        raise RuntimeError("heads of queries, keys and values do not fit")
    assert all(x.dim() == 3 and x.stride(-1) == 1 for x in tensors)
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in starts)
    # The real kernel reads them on the GPU, so this is no copy that pretended GPUs should count.
    limits = [torch._C.TensorBase.tolist(x) for x in starts]
    assert len(limits[0]) == len(limits[1]) >= 2
    # Sequences of a single query take another path in the kernel.
    assert most[0] >= 2
    for limit, tensor, largest in zip(limits, (query, key), most, strict=True):
        lengths = [end - start for start, end in pairwise(limit)]
        assert limit[0] == 0 and limit[-1] == len(tensor), "some tokens are in no sequence"
        assert min(lengths) > 0 and max(lengths) <= largest
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    left, right = (-1 if x is None else x for x in window)
    right = 0 if causal else right
    for of_queries, of_keys in zip(*map(pairwise, limits), strict=True):
        queries, keys = slice(*of_queries), slice(*of_keys)
        count, seen = queries.stop - queries.start, keys.stop - keys.start
        # The last query stands beside the last key.
        place, other = torch.arange(count)[:, None] + seen - count, torch.arange(seen)
        hidden = ((left >= 0) & (other < place - left)) | ((right >= 0) & (other > place + right))
        shown = _by_head(key[keys]).repeat_interleave(query.shape[1] // key.shape[1], 0)
        scores = factor * _by_head(query[queries]) @ shown.mT
        yield queries, keys, scores.masked_fill(hidden, -torch.inf)


def _lse_dtype(query: Tensor) -> torch.dtype:
    return torch.promote_types(query.dtype, torch.float32)


def _by_head(rows: Tensor) -> Tensor:
    """Convert ``[tokens, heads, D]`` to float64 ``[heads, tokens, D]``."""
    return rows.double().transpose(0, 1)


@contextmanager
def on_the_cpu() -> Iterator[None]:
    """Let PyTorch call the stand-in for tensors on the CPU."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    try:
        yield
    finally:
        library._destroy()
