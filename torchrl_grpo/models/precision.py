"""Number formats and kernels. ``auto`` in the configuration is resolved here for this machine."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from torchrl_grpo.models import lora
from torchrl_grpo.runtime.hardware import cpu_has_fast_bfloat16

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether ``device`` computes matrix products faster in bfloat16, so that ``auto`` selects it."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return cpu_has_fast_bfloat16()


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype for ``auto``, ``float32``, ``bfloat16`` or ``float16`` on ``device``."""
    if name == "auto":
        return torch.bfloat16 if has_fast_bfloat16(device) else torch.float32
    return _DTYPES[name]


def resolve_autocast(name: str, device: torch.device) -> torch.dtype | None:
    """Return the autocast dtype for ``auto``, ``no``, ``bf16`` or ``fp16`` on ``device``; None means off."""
    if name == "auto":
        return torch.bfloat16 if has_fast_bfloat16(device) else None
    return None if name == "no" else _AUTOCAST[name]


def resolve_head(name: str) -> torch.dtype | None:
    """Return the dtype of the output head for ``auto`` or ``float32``; None means that of other products."""
    return None if name == "auto" else _DTYPES[name]


def autocast(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which matrix products run in ``dtype``. It has no effect if ``dtype`` is None."""
    if dtype is None:
        return nullcontext()
    # A pass without gradients uses each weight once, so copies that autocast keeps would only take memory.
    return torch.autocast(device.type, dtype=dtype, cache_enabled=torch.is_grad_enabled())


def cast_weights_once(device: torch.device, passes: int) -> AbstractContextManager[object]:
    """Return a context in which autocast casts each trained weight once, and not once a micro-batch.

    Weights must not change in it, and every forward pass in it must have gradients: a copy that was made
    without them would be reused where they are needed.

    Args:
        device: device of the weights.
        passes: number of micro-batches. For one on a GPU the context has no effect, because the copies would
            lie beside all gradients. With several they do so at the start of the second backward pass anyway.
    """
    # The outermost context empties autocast's cache at its end. It does not enable autocast.
    is_used = device.type == "cpu" or passes > 1
    return torch.autocast(device.type, enabled=False) if is_used else nullcontext()


def choose_kernels() -> None:
    """Select kernels for this process: full float32 precision, and attention without cuDNN.

    On an H100 and later, PyTorch prefers cuDNN's attention. It builds a plan for each new size, which takes
    about a second, and the sizes of micro-batches and of decoding change with every call. Some container
    images enable TF32, which has 10 mantissa bits. With it, engine and trainer would differ by more than
    rounding.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.set_float32_matmul_precision("highest")


@torch.no_grad()
def lost_to_rounding(model: nn.Module, dtype: torch.dtype, delta: float) -> float:
    """Return the fraction of weights that round to the same number in ``dtype`` after a change by ``delta``.

    Trained weights are float32. A computation in 16 bits (autocast, an engine) sees a change only if it is
    larger than half the distance between two numbers, which for bfloat16 is at least 1/512 of the weight.
    Models that were saved in bfloat16 start exactly on such a number.

    Args:
        model: model of which every 16th weight is sampled. With adapters, their base matrices are sampled.
            With sharded weights, this rank's shard is sampled.
        dtype: dtype of the computation.
        delta: absolute change of each trained weight.
    """
    lost = total = 0
    for matrix, bound in lora.weight_change_bounds(model, delta):
        weights, changes = matrix.flatten()[::16].float(), bound.expand_as(matrix).flatten()[::16]
        lost += int(((weights + changes).to(dtype) == (weights - changes).to(dtype)).sum())
        total += weights.numel()
    return lost / total
