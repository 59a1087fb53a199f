"""Attention as plain matrix products, for short rows on a CPU in bfloat16.

PyTorch's own kernel multiplies small tiles in this case, and its forward and backward passes take 1.7 times
as long as the same products in batches. Scores are computed for as many heads at a time as fit in a core's
cache. They are not stored, and the backward pass recomputes them. Numbers are not rounded earlier than in the
kernel: scores, probabilities and their gradients are float32, and only the operands of the last products of
the backward pass are bfloat16. With float32 and float64 inputs, nothing is rounded to another format.

Axes: ``B`` rows, ``H`` query heads, ``K`` key heads, ``T`` queries, ``S`` keys, ``D`` and ``E`` sizes of a
head of queries and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# Number of scores in memory: 1 MiB. A larger block leaves the cache between two products.
_BLOCK_ELEMENTS = 2**18


def is_faster(query: Tensor, key: Tensor, dtype: torch.dtype) -> bool:
    """Whether :func:`attend` is faster than PyTorch's kernel for operands that are cast to ``dtype``.

    ``query`` is ``[B, H, T, D]`` and ``key`` is ``[B, K, S, D]``.

    If the scores of one key head do not fit in the cache, PyTorch's kernel is as fast and needs less memory.
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
    """Compute ``softmax(scaling * query @ key.T) @ value``. Each key head serves H / K query heads.

    Args:
        query: ``[B, H, T, D]``.
        key: ``[B, K, S, D]``.
        value: ``[B, K, S, E]``.
        mask: bool ``[B, 1, T, S]`` or ``[T, S]``, True if a query sees a key. None means causal, which needs
            as many keys as queries. Every query must see at least one key. Otherwise its output is NaN, and
            so are the gradients of its row's keys and values.
        scaling: factor of the scores; None for ``D ** -0.5``.
        block_elements: number of scores in memory, but at least those of one key head.

    Returns:
        ``[B, H, T, E]``.
    """
    T, S = query.shape[2], key.shape[2]
    if mask is None:
        mask = torch.ones(T, S, dtype=torch.bool).tril_()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    seen = mask.expand(len(query), 1, T, S)
    # Autocast would also compute float32 products in bfloat16.
    with torch.autocast(query.device.type, enabled=False):
        out: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
            query, key, value, seen, scale, block_elements
        )
    return out


class _Attention(torch.autograd.Function):
    """:func:`attend`. The backward pass needs only the inputs of the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float, size: int
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, seen)
        ctx.scale, ctx.size = scale, size
        q, k, v = _by_key_head(query, key), key.flatten(0, 1), value.flatten(0, 1)
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        # One cast for all blocks.
        wide_q, wide_k, wide_v = _widened(q) * scale, _widened(k), _widened(v)
        for part, visible in _blocks(q, k, seen, size):
            shares = _probabilities(wide_q[part], wide_k[part], visible)
            out[part] = torch.bmm(shares, wide_v[part])
        return out.view(*query.shape[:3], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, seen = ctx.saved_tensors
        q, k, v = _by_key_head(query, key), key.flatten(0, 1), value.flatten(0, 1)
        by_out = _by_key_head(gradients[0], key)
        by_q, by_k, by_v = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
        # The gradients of a query's scores sum to 0, but after rounding only approximately. A component that
        # all keys share (as with Qwen2's biases), times that error, would enter the gradient of the queries.
        # So the mean key is subtracted first.
        centered = k - torch.bmm(k.new_full((len(k), 1, k.shape[1]), 1 / k.shape[1]), k)
        wide_q = _widened(q) * ctx.scale
        wide_k, wide_v, wide_out = map(_widened, (k, v, by_out))
        for part, visible in _blocks(q, k, seen, ctx.size):
            shares = _probabilities(wide_q[part], wide_k[part], visible)
            torch.bmm(shares.to(v.dtype).mT, by_out[part], out=by_v[part])
            by_shares = torch.bmm(wide_out[part], wide_v[part].mT)
            by_scores = torch._softmax_backward_data(by_shares, shares, -1, shares.dtype)
            by_scores = by_scores.mul_(ctx.scale).to(q.dtype)
            torch.bmm(by_scores, centered[part], out=by_q[part])
            torch.bmm(by_scores.mT, q[part], out=by_k[part])
        return by_q.view(query.shape), by_k.view(key.shape), by_v.view(value.shape), None, None, None


def _by_key_head(queries: Tensor, key: Tensor) -> Tensor:
    """Reshape ``[B, H, T, .]`` to ``[B K, H/K T, .]``: all queries of a key head are in one product."""
    return queries.reshape(-1, queries.shape[1] // key.shape[1] * queries.shape[2], queries.shape[3])


def _blocks(q: Tensor, k: Tensor, seen: Tensor, size: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield blocks of n of the ``B K`` key heads, and their masks ``[n, 1, T, S]``."""
    rows = torch.arange(len(q)) // (len(q) // len(seen))
    step = max(1, size // (q.shape[1] * k.shape[1]))
    for start in range(0, len(q), step):
        part = slice(start, start + step)
        yield part, seen[rows[part]]


def _widened(operand: Tensor) -> Tensor:
    """Cast an operand to float32 if its dtype is narrower."""
    return operand.to(torch.promote_types(operand.dtype, torch.float32))


def _probabilities(q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
    """Compute ``[n, H/K T, S]`` from scaled queries ``[n, H/K T, D]`` and keys ``[n, S, D]``."""
    scores = torch.bmm(q, k.mT)
    hidden = torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)
    scores.view(len(q), -1, *visible.shape[2:]).add_(hidden)
    return torch.softmax(scores, -1)
