"""Attention for short rows on a CPU in bfloat16, with a backward pass of plain matrix products.

The forward pass is PyTorch's kernel. Its backward kernel multiplies small tiles and takes two to three times
as long as the same products in batches. Scores are computed for as many heads at a time as fit in a core's
cache. They are not stored, and the backward pass recomputes them. They are float32, and so are the sums of
products. Probabilities and their gradients are rounded to bfloat16 for the products that they enter. With
float32 and float64 inputs, nothing is rounded to another format.

Axes: ``B`` rows, ``H`` query heads, ``K`` key heads, ``T`` queries, ``S`` keys, ``D`` and ``E`` sizes of a
head of queries and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Number of scores in memory: 2 MiB. A larger block leaves the cache between two products.
_BLOCK_ELEMENTS = 2**19
# With more scores of one key head, PyTorch's kernel is as fast and needs less memory.
_MOST_SCORES = 2**18


def is_faster(query: Tensor, key: Tensor, dtype: torch.dtype) -> bool:
    """Whether :func:`attend` is faster than PyTorch's kernel for operands that are cast to ``dtype``.

    ``query`` is ``[B, H, T, D]`` and ``key`` is ``[B, K, S, D]``.
    """
    scores = query.shape[1] // key.shape[1] * query.shape[2] * key.shape[2]
    return query.device.type == "cpu" and dtype == torch.bfloat16 and 0 < scores <= _MOST_SCORES


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    block_elements: int = _BLOCK_ELEMENTS,
) -> Tensor:
    """Compute ``softmax(scaling * query @ key.T + mask) @ value``. Each key head serves H / K query heads.

    Args:
        query: ``[B, H, T, D]``.
        key: ``[B, K, S, D]``.
        value: ``[B, K, S, E]``.
        mask: ``[B, 1, T, S]`` or ``[T, S]`` in float32 or wider, 0 if a query sees a key and minus infinity
            if not. None means causal, which needs as many keys as queries. Every query must see a key.
        scaling: factor of the scores; None for ``D ** -0.5``.
        block_elements: number of scores in memory, but at least those of one key head.

    Returns:
        ``[B, H, T, E]``.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # The kernel takes heads of one size. Zeros change neither scores nor the first E numbers of the result.
    size = value.shape[-1]
    width = max(query.shape[-1], size)
    query, key, value = (
        x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value)
    )
    # Autocast would also compute float32 products in bfloat16.
    with torch.autocast(query.device.type, enabled=False):
        out: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
            query, key, value, mask, scale, block_elements
        )
    return out[..., :size]


class _Attention(torch.autograd.Function):
    """:func:`attend`. The backward pass needs the inputs of the forward pass, and a number per query."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, size: int
    ) -> Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        rows = mask if mask is None or mask.dim() == 4 else mask.expand(len(query), 1, *mask.shape)
        out: Tensor
        out, normalizer = kernel(query, key, value, is_causal=mask is None, attn_mask=rows, scale=scale)
        ctx.save_for_backward(query, key, value, rows, normalizer)
        ctx.scale, ctx.size = scale, size
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, normalizer = ctx.saved_tensors
        B, _, T, _ = query.shape
        if mask is None:
            mask = torch.full((T, T), -torch.inf, dtype=normalizer.dtype).triu_(1).expand(B, 1, T, T)
        q, k, v = _by_key_head(query, key), key.flatten(0, 1), value.flatten(0, 1)
        by_out = _by_key_head(gradients[0], key)
        by_q, by_k, by_v = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
        # One more column: the product then gives the logarithms of probabilities.
        wide_q, wide_k = _widened(q), _widened(k)
        wide_q[..., :-1].mul_(wide_q.new_full((), ctx.scale))
        torch.neg(normalizer.reshape(q.shape[:2]), out=wide_q[..., -1])
        wide_k[..., -1].fill_(1.0)
        centered_k, centered_v = _centered(k), _centered(v)
        for part, hidden in _blocks(q, k, mask, ctx.size):
            exact = torch.bmm(wide_q[part], wide_k[part].mT)
            exact.view(len(hidden), -1, *hidden.shape[2:]).add_(hidden)
            shares = exact.exp_().to(v.dtype)
            torch.bmm(shares.mT, by_out[part], out=by_v[part])
            by_shares = torch.bmm(by_out[part], centered_v[part].mT)
            by_scores = torch._softmax_backward_data(by_shares, shares, -1, shares.dtype)
            torch.bmm(by_scores, centered_k[part], out=by_q[part])
            torch.bmm(by_scores.mT, q[part], out=by_k[part])
        by_q, by_k = by_q.mul_(ctx.scale), by_k.mul_(ctx.scale)
        return by_q.view(query.shape), by_k.view(key.shape), by_v.view(value.shape), None, None, None


def _by_key_head(queries: Tensor, key: Tensor) -> Tensor:
    """Reshape ``[B, H, T, .]`` to ``[B K, H/K T, .]``: all queries of a key head are in one product."""
    return queries.reshape(-1, queries.shape[1] // key.shape[1] * queries.shape[2], queries.shape[3])


def _blocks(q: Tensor, k: Tensor, mask: Tensor, size: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield blocks of the ``B K`` key heads, of whole rows or within a row, and the masks of their rows."""
    heads = len(q) // len(mask)
    step = max(1, size // (q.shape[1] * k.shape[1]))
    rows = max(1, step // heads)
    for row in range(0, len(mask), rows):
        end = min(row + rows, len(mask)) * heads
        for start in range(row * heads, end, step):
            yield slice(start, min(start + step, end)), mask[row : row + rows]


def _centered(x: Tensor) -> Tensor:
    """Subtract from keys or values ``[B K, S, .]`` their mean.

    It changes no gradient of queries and keys, because the gradients of a query's scores sum to 0. After
    rounding they do so only approximately, and a component that all keys or all values share (as with Qwen2's
    biases), times that error, would enter those gradients.
    """
    return x - torch.bmm(x.new_full((len(x), 1, x.shape[1]), 1 / x.shape[1]), x)


def _widened(operand: Tensor) -> Tensor:
    """Return an operand ``[B K, S, D]`` in float32, or wider if it is, before a column that is not set."""
    *rows, size = operand.shape
    wide = torch.empty(*rows, size + 1, dtype=torch.promote_types(operand.dtype, torch.float32))
    wide[..., :-1] = operand
    return wide
