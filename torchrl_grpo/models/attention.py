"""Attention as plain matrix products, for a CPU in bfloat16.

PyTorch's own kernel multiplies small tiles there: its backward pass takes three times as long as the same
products in batches. Scores exist for a few rows at a time, as many as fit in a core's cache, and the backward
pass computes them again, so that memory does not grow with the number of pairs. Scores and probabilities are
rounded to bfloat16 as in transformers' own (``eager``) attention, but about the mean of the keys.

Axes: ``B`` rows, ``H`` heads of queries, ``K`` of keys, ``T`` queries, ``S`` keys, ``D`` and ``E`` sizes of
a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# Scores at a time: 2 MiB in bfloat16. Larger ones leave the cache between two products.
_BLOCK_ELEMENTS = 2**20
# A row with more scores than this is left to PyTorch's kernel, which never holds them.
_MOST_OF_A_ROW = 2**24


def suits(query: Tensor, key: Tensor) -> bool:
    """Whether :func:`attend` is for these ``[B, H, T, D]`` queries and ``[B, K, S, D]`` keys."""
    pairs = query.shape[1] * query.shape[2] * key.shape[2]
    return query.device.type == "cpu" and query.dtype == torch.bfloat16 and 0 < pairs <= _MOST_OF_A_ROW


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    block_elements: int = _BLOCK_ELEMENTS,
) -> Tensor:
    """``softmax(scaling * query @ key.T) @ value``, gradients included; each key head serves H / K heads.

    Args:
        query: ``[B, H, T, D]``.
        key: ``[B, K, S, D]``.
        value: ``[B, K, S, E]``.
        mask: bool, True where a query sees a key, ``[B, 1, T, S]`` or ``[T, S]``; None is causal, for as many
            keys as queries. Every query sees one key at least.
        scaling: None for ``D ** -0.5``.
        block_elements: scores in memory at a time, a row's at least.

    Returns:
        ``[B, H, T, E]``.
    """
    T, S = query.shape[2], key.shape[2]
    if mask is None:
        mask = torch.ones(T, S, dtype=torch.bool).tril_()
    hidden = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
    hidden = hidden.expand(len(query), 1, T, S)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out: Tensor = _Attention.apply(query, key, value, hidden, scale, block_elements)
    return out


class _Attention(torch.autograd.Function):
    """:func:`attend`; the backward pass needs what the forward pass was given, and nothing else."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, scale: float, size: int
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, hidden)
        ctx.scale, ctx.size = scale, size
        out = query.new_empty(*query.shape[:3], value.shape[-1])
        for rows in _blocks(query, key, size):
            q, k = _grouped(query[rows] * scale, key), _centred(key[rows])[0]
            v, middle = _centred(value[rows])
            seen = _probabilities(q, k, hidden[rows])
            torch.baddbmm(middle, seen, v, out=out[rows].view(*seen.shape[:2], -1))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, hidden = ctx.saved_tensors
        by_query, by_key, by_value = (torch.empty(x.shape, dtype=x.dtype) for x in (query, key, value))
        for rows in _blocks(query, key, ctx.size):
            q, k = _grouped(query[rows] * ctx.scale, key), _centred(key[rows])[0]
            v, by_out = _centred(value[rows])[0], _grouped(gradients[0][rows], key)
            seen = _probabilities(q, k, hidden[rows])
            torch.bmm(seen.mT, by_out, out=by_value[rows].view(v.shape))
            by_seen = torch.bmm(by_out, v.mT)
            by_scores = torch._softmax_backward_data(by_seen, seen, -1, seen.dtype)
            torch.bmm(by_scores, k, out=by_query[rows].view(q.shape))
            torch.bmm(by_scores.mT, q, out=by_key[rows].view(k.shape))
        return by_query.mul_(ctx.scale), by_key, by_value, None, None, None


def _blocks(query: Tensor, key: Tensor, size: int) -> Iterator[slice]:
    B, H, T, _ = query.shape
    step = max(1, size // (H * T * key.shape[2]))
    yield from (slice(start, start + step) for start in range(0, B, step))


def _grouped(queries: Tensor, key: Tensor) -> Tensor:
    """``[b K, H/K T, .]`` from ``[b, H, T, .]``: queries that share a key head are one product."""
    return queries.reshape(-1, queries.shape[1] // key.shape[1] * queries.shape[2], queries.shape[3])


def _centred(x: Tensor) -> tuple[Tensor, Tensor]:
    """``[b K, S, .]`` about the mean of its keys, from ``[b, K, S, .]``, and the mean ``[b K, 1, .]``.

    What all keys have in common moves all scores of a query alike, which changes no probability, but large
    numbers have large roundings. Of values it moves the result, and no gradient of a score.
    """
    flat = x.flatten(0, 1)
    middle = flat.mean(1, keepdim=True)
    return flat - middle, middle


def _probabilities(q: Tensor, k: Tensor, hidden: Tensor) -> Tensor:
    """``[b K, H/K T, S]`` of scaled queries ``[b K, H/K T, D]`` and keys ``[b K, S, D]``."""
    b, _, T, S = hidden.shape
    scores = torch.bmm(q, k.mT)
    scores.view(b, len(q) // b, -1, T, S).add_(hidden[:, :, None])
    return torch.softmax(scores, -1)
