"""Ragged token lists to padded tensors, and their masks.

Masks come from lengths, never from a pad id: a model's pad token may well be its end token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pad_left(rows: Sequence[Sequence[int]], fill: int) -> tuple[Tensor, Tensor]:
    """``rows`` of ids as ``[N, L]`` int64 padded on the left with ``fill``, and the ``[N, L]`` bool mask."""
    lengths = torch.tensor([len(row) for row in rows])
    width = int(lengths.max())
    mask = torch.arange(width) >= width - lengths[:, None]
    return _fill(rows, mask, torch.full(mask.shape, fill, dtype=torch.int64)), mask


def pad_right(rows: Sequence[Sequence[float]], fill: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``rows`` as ``[N, T]`` of ``dtype`` padded on the right with ``fill``, and the ``[N, T]`` bool mask."""
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    return _fill(rows, mask, torch.full(mask.shape, fill, dtype=dtype)), mask


def _fill(rows: Sequence[Sequence[float]], mask: Tensor, out: Tensor) -> Tensor:
    out[mask] = torch.tensor([value for row in rows for value in row], dtype=out.dtype)
    return out
