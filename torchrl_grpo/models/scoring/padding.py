"""Pad ragged lists of tokens to tensors with masks.

Masks come from lengths and not from the pad token, because a model's pad token may be its end token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def pad_left(rows: Sequence[Sequence[int]], fill: int) -> tuple[Tensor, Tensor]:
    """Pad ``rows`` of ids on the left with ``fill``; returns int64 ``[N, L]`` and a bool mask ``[N, L]``."""
    lengths = torch.tensor([len(row) for row in rows])
    width = int(lengths.max())
    mask = torch.arange(width) >= width - lengths[:, None]
    return _fill(rows, torch.full(mask.shape, fill, dtype=torch.int64), left=True), mask


def pad_right(rows: Sequence[Sequence[float]], fill: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Pad ``rows`` on the right with ``fill``; returns ``dtype`` ``[N, T]`` and the bool mask ``[N, T]``."""
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    return _fill(rows, torch.full(mask.shape, fill, dtype=dtype), left=False), mask


def whole_rows(
    prompt: Tensor, prompt_mask: Tensor, response: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Join each of ``P G`` responses to a copy of its prompt, with padding before and after.

    Args:
        prompt: ``[P, L]``. All tensors are on the CPU.
        prompt_mask: ``[P, L]`` bool.
        response: ``[P, G, T]``.
        mask: ``[P, G, T]`` bool.

    Returns:
        Token ids and mask ``[P G, L + T]``, and the position in the flattened rows of the token before each
        real response token.
    """
    (P, L), (_, G, T) = prompt.shape, response.shape
    ids = torch.cat([prompt.repeat_interleave(G, 0), response.reshape(P * G, T)], dim=1)
    attention = torch.cat([prompt_mask.repeat_interleave(G, 0), mask.reshape(P * G, T)], dim=1)
    # The state before a token predicts it.
    rows, steps = mask.reshape(P * G, T).nonzero(as_tuple=True)
    return ids, attention, rows * (L + T) + steps + L - 1


def join_files(rows: Sequence[Sequence[bytes]]) -> tuple[Tensor, Tensor]:
    """Pack the files of N rows into uint8 ``[N, B]``, and the sizes of at most K files into int64 ``[N, K]``.

    Both are padded on the right with 0, and have at least one column.
    """
    width = max(1, *(len(row) for row in rows))
    sizes = torch.tensor([[len(data) for data in row] + [0] * (width - len(row)) for row in rows])
    files = torch.zeros(len(rows), max(1, int(sizes.sum(-1).max())), dtype=torch.uint8)
    for target, row in zip(files, rows, strict=True):
        joined = bytearray().join(row)
        if joined:
            target[: len(joined)] = torch.frombuffer(joined, dtype=torch.uint8)
    return files, sizes


def split_files(files: Tensor, sizes: Tensor) -> list[list[bytes]]:
    """Undo :func:`join_files`."""
    rows = []
    for packed, counts in zip(files.cpu(), sizes.cpu().tolist(), strict=True):
        parts = packed[: sum(counts)].split([count for count in counts if count])
        rows.append([part.numpy().tobytes() for part in parts])
    return rows


def _fill(rows: Sequence[Sequence[float]], out: Tensor, *, left: bool) -> Tensor:
    """Write ``rows`` to those of ``out``, behind the padding on their left or before that on their right."""
    places = out.numpy()
    for place, row in zip(places, rows, strict=True):
        # In a fifth of the time of torch.tensor(), and without looking at the padding as a mask does.
        values = np.fromiter(row, places.dtype, len(row))
        place[len(place) - len(row) if left else 0 :][: len(row)] = values
    return out
