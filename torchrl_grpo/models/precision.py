"""Which number formats this machine computes fast in; ``auto`` in the configuration resolves here."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 matrix products run in hardware on ``device``.

    Without such instructions a CPU computes them a hundred times slower than float32
    (measured on AVX2: 1 against 137 GFLOP/s), so ``auto`` must not pick bfloat16 there.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The torch dtype for ``auto``, ``float32``, ``bfloat16`` or ``float16`` on ``device``."""
    if name == "auto":
        return torch.bfloat16 if has_fast_bfloat16(device) else torch.float32
    return _DTYPES[name]


def resolve_autocast(name: str, device: torch.device) -> torch.dtype | None:
    """The autocast dtype for ``auto``, ``no``, ``bf16`` or ``fp16`` on ``device``; None means off."""
    if name == "auto":
        return torch.bfloat16 if has_fast_bfloat16(device) else None
    return None if name == "no" else _AUTOCAST[name]


def autocast(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[object]:
    """A context in which matrix products run in ``dtype``; does nothing when ``dtype`` is None."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


@torch.no_grad()
def lost_to_rounding(weights: Iterable[Tensor], dtype: torch.dtype, move: float) -> float:
    """Share of the weights that are the same number in ``dtype`` after they have moved by ``move``.

    Weights are float32 where they are trained. Whoever computes with them in 16 bits (autocast, an engine)
    sees a move only once it is larger than half the distance between two numbers, which for bfloat16 is
    1/512 of the weight and more; and models that were saved in bfloat16 begin exactly on such a number.

    Args:
        weights: one in sixteen of their numbers are looked at.
        dtype: what is computed with.
        move: in either direction.
    """
    lost = total = 0
    for tensor in weights:
        some = tensor.detach().flatten()[::16].float()
        lost += int(((some + move).to(dtype) == (some - move).to(dtype)).sum())
        total += some.numel()
    return lost / total
