"""Additive attention masks, which all layers share: on GPUs, and on a CPU in bfloat16.

PyTorch's memory-efficient kernel, which takes masks, needs them in the dtype of the queries and with strides
that are multiples of 8. It would convert a boolean mask in every layer, and keep every layer's copy for the
backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

_STRIDE = 8


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a mask ``[..., S]`` that is True on visible keys to a summand of the scores in ``dtype``.

    Its strides are multiples of 8, so the memory-efficient kernel uses its storage as it is.
    """
    *rows, keys = seen.shape
    wide = torch.zeros(*rows, -(-keys // _STRIDE) * _STRIDE, dtype=dtype, device=seen.device)
    return wide[..., :keys].masked_fill_(~seen, -torch.inf)
