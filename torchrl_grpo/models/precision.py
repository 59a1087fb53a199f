"""Which number formats this machine computes fast in; ``auto`` in the configuration resolves here."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from torchrl_grpo.models import lora
from torchrl_grpo.runtime.hardware import cpu_has_fast_bfloat16

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether ``device`` computes matrix products faster in bfloat16, so that ``auto`` picks it."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return cpu_has_fast_bfloat16()


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


def resolve_head(name: str) -> torch.dtype | None:
    """The dtype of the output head for ``auto`` or ``float32``; None means that of the other products."""
    return None if name == "auto" else _DTYPES[name]


def autocast(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[object]:
    """A context in which matrix products run in ``dtype``; does nothing when ``dtype`` is None."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def choose_kernels() -> None:
    """Choose kernels for this process: float32 with all of its bits, and attention without cuDNN's.

    On an H100 and later PyTorch prefers cuDNN's attention. It keeps a plan for each size it has seen, which
    takes about a second, and the sizes of micro-batches and of decoding change with every call. TF32, ten
    bits of a float32, is off unless the environment asks for it, as some container images do; engine and
    trainer would then differ by more than rounding.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.set_float32_matmul_precision("highest")


@torch.no_grad()
def lost_to_rounding(model: nn.Module, dtype: torch.dtype, move: float) -> float:
    """Share of the weights that are the same number in ``dtype`` after they have moved by ``move``.

    Weights are float32 where they are trained. Whoever computes with them in 16 bits (autocast, an engine)
    sees a move only once it is larger than half the distance between two numbers, which for bfloat16 is
    1/512 of the weight and more; and models that were saved in bfloat16 begin exactly on such a number.

    Args:
        model: one in sixteen of its weights are looked at; with adapters, of the matrices they belong to; in
            shards, of this rank's.
        dtype: what is computed with.
        move: of each trained weight, in either direction.
    """
    lost = total = 0
    for matrix, moves in lora.reach(model, move):
        weights, by = matrix.flatten()[::16].float(), moves.expand_as(matrix).flatten()[::16]
        lost += int(((weights + by).to(dtype) == (weights - by).to(dtype)).sum())
        total += weights.numel()
    return lost / total
