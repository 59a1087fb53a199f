"""Weights of tokens in the loss.

All weights are relative to the whole optimizer batch, so the sums of its micro-batches add up to the sum of
one large batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class BatchTotals(NamedTuple):
    """Counts of a whole optimizer batch. Only tokens in the loss mask count.

    Attributes:
        tokens: number of response tokens.
        sequences: number of responses with at least one such token.
    """

    tokens: int
    sequences: int


def count_totals(mask: Tensor) -> BatchTotals:
    """Count the tokens and responses of a loss mask ``[P, G, T]``."""
    return BatchTotals(int(mask.sum()), int(mask.any(-1).sum()))


def token_weights(
    mask: Tensor, aggregation: str, totals: BatchTotals, constant_length: int, dtype: torch.dtype
) -> Tensor:
    """Return the weight of each token in the loss, zero outside ``mask``.

    ``token``: ``1 / N``, the mean over the N tokens of the batch (DAPO, arXiv 2503.14476, eq. 8).
    ``sequence``: ``1 / (B |o_i|)``, the mean per response, then over the B responses (GRPO, 2402.03300,
    eq. 3).
    ``constant``: ``1 / (B constant_length)``, the sum per response divided by a constant (Dr. GRPO,
    2503.20783, listing 1).

    Args:
        mask: ``[P, G, T]`` bool, True for tokens that the loss counts.
        aggregation: ``token``, ``sequence`` or ``constant``.
        totals: counts of the whole optimizer batch.
        constant_length: divisor in tokens, for ``constant``.
        dtype: dtype of the weights.

    Returns:
        Weights ``[P, G, T]``.

    Raises:
        ValueError: ``aggregation`` is unknown.
    """
    counts = mask.to(dtype)
    if aggregation == "token":
        return counts / max(1, totals.tokens)
    if aggregation == "sequence":
        return counts / (max(1, totals.sequences) * counts.sum(-1, keepdim=True).clamp(min=1))
    if aggregation == "constant":
        return counts / (max(1, totals.sequences) * constant_length)
    raise ValueError(f"aggregation {aggregation!r} is none of token, sequence, constant")
