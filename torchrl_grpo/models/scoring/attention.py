"""Attention as plain matrix products, for short rows on a CPU in bfloat16.

PyTorch's own kernel multiplies small tiles there: its two passes take 1.7 times as long as the same products
in batches. Scores exist for a few heads at a time, as many as fit in a core's cache, and the backward pass
computes them again; no layer keeps any. Numbers are rounded no earlier than in the kernel: scores,
probabilities and their gradients are float32, and only what enters the last products of the backward pass is
bfloat16. Float32 and float64 stay what they are throughout.

Axes: ``B`` rows, ``H`` heads of queries, ``K`` of keys, ``T`` queries, ``S`` keys, ``D`` and ``E`` sizes of
a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# Scores at a time: 1 MiB. Larger ones leave the cache between two products.
_BLOCK_ELEMENTS = 2**18


def suits(query: Tensor, key: Tensor, dtype: torch.dtype) -> bool:
    """Whether :func:`attend` is for ``[B, H, T, D]`` queries and ``[B, K, S, D]`` keys, cast to ``dtype``.

    Where the scores of one key head do not fit in the cache, PyTorch's kernel is as fast and holds fewer.
    """
    scores = query.shape[1] // key.shape[1] * query.shape[2] * key.shape[2]
    return query.device.type == "cpu" and dtype == torch.bfloat16 and 0 < scores <= _BLOCK_ELEMENTS


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
            keys as queries. Every query sees one key at least: one that sees none gets NaN, and makes NaN
            of the gradients of its row's keys and values too.
        scaling: None for ``D ** -0.5``.
        block_elements: scores in memory at a time, a key head's at least.

    Returns:
        ``[B, H, T, E]``.
    """
    T, S = query.shape[2], key.shape[2]
    if mask is None:
        mask = torch.ones(T, S, dtype=torch.bool).tril_()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    seen = mask.expand(len(query), 1, T, S)
    # Autocast would compute the products of float32 in bfloat16 too.
    with torch.autocast(query.device.type, enabled=False):
        out: Tensor = _Attention.apply(query, key, value, seen, scale, block_elements)
    return out


class _Attention(torch.autograd.Function):
    """:func:`attend`; the backward pass needs what the forward pass was given, and nothing else."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float, size: int
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, seen)
        ctx.scale, ctx.size = scale, size
        q, k, v = _by_key_head(query, key), key.flatten(0, 1), value.flatten(0, 1)
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        for part, visible in _blocks(q, k, seen, size):
            shares = _probabilities(q[part], k[part], visible, scale)
            out[part] = torch.bmm(shares, v[part].to(shares.dtype))
        return out.view(*query.shape[:3], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, seen = ctx.saved_tensors
        q, k, v = _by_key_head(query, key), key.flatten(0, 1), value.flatten(0, 1)
        by_out = _by_key_head(gradients[0], key)
        by_q, by_k, by_v = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
        # A query's gradients of scores add up to 0, and rounded only nearly. What all keys have in common, as
        # by Qwen2's biases, would enter the gradient of queries times the difference; so it goes before.
        centered = k - torch.bmm(k.new_full((len(k), 1, k.shape[1]), 1 / k.shape[1]), k)
        for part, visible in _blocks(q, k, seen, ctx.size):
            shares = _probabilities(q[part], k[part], visible, ctx.scale)
            torch.bmm(shares.to(v.dtype).mT, by_out[part], out=by_v[part])
            by_shares = torch.bmm(by_out[part].to(shares.dtype), v[part].to(shares.dtype).mT)
            by_scores = torch._softmax_backward_data(by_shares, shares, -1, shares.dtype)
            by_scores = by_scores.mul_(ctx.scale).to(q.dtype)
            torch.bmm(by_scores, centered[part], out=by_q[part])
            torch.bmm(by_scores.mT, q[part], out=by_k[part])
        return by_q.view(query.shape), by_k.view(key.shape), by_v.view(value.shape), None, None, None


def _by_key_head(queries: Tensor, key: Tensor) -> Tensor:
    """``[B K, H/K T, .]`` from ``[B, H, T, .]``: queries that share a key head are one product."""
    return queries.reshape(-1, queries.shape[1] // key.shape[1] * queries.shape[2], queries.shape[3])


def _blocks(q: Tensor, k: Tensor, seen: Tensor, size: int) -> Iterator[tuple[slice, Tensor]]:
    """Parts of the ``B K`` key heads, and whom the queries of each see, ``[n, 1, T, S]``."""
    rows = torch.arange(len(q)) // (len(q) // len(seen))
    step = max(1, size // (q.shape[1] * k.shape[1]))
    for start in range(0, len(q), step):
        part = slice(start, start + step)
        yield part, seen[rows[part]]


def _probabilities(q: Tensor, k: Tensor, visible: Tensor, scale: float) -> Tensor:
    """``[n, H/K T, S]`` of queries ``[n, H/K T, D]`` and keys ``[n, S, D]``, float32 at least."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = torch.bmm(q.to(dtype) * scale, k.to(dtype).mT)
    hidden = torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)
    scores.view(len(q), -1, *visible.shape[2:]).add_(hidden)
    return torch.softmax(scores, -1)
