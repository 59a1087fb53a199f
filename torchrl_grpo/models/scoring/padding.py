"""Pad ragged lists of tokens to tensors with masks.

Masks come from lengths and not from the pad token, because a model's pad token may be its end token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pad_left(rows: Sequence[Sequence[int]], fill: int) -> tuple[Tensor, Tensor]:
    """Pad ``rows`` of ids on the left with ``fill``; returns int64 ``[N, L]`` and a bool mask ``[N, L]``."""
    lengths = torch.tensor([len(row) for row in rows])
    width = int(lengths.max())
    mask = torch.arange(width) >= width - lengths[:, None]
    return _fill(rows, mask, torch.full(mask.shape, fill, dtype=torch.int64)), mask


def pad_right(rows: Sequence[Sequence[float]], fill: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Pad ``rows`` on the right with ``fill``; returns ``dtype`` ``[N, T]`` and the bool mask ``[N, T]``."""
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    return _fill(rows, mask, torch.full(mask.shape, fill, dtype=dtype)), mask


def _fill(rows: Sequence[Sequence[float]], mask: Tensor, out: Tensor) -> Tensor:
    out[mask] = torch.tensor([value for row in rows for value in row], dtype=out.dtype)
    return out
