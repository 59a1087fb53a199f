"""The output head by Liger's fused kernel, which writes no logits to the GPU's memory.

It computes what :mod:`~torchrl_grpo.models.head` does, log-probability and entropy of each token with a
gradient for both, on GPUs of compute capability 9.0 (H100, H200) in bfloat16, without bias and cap.
Everywhere else, and where it is not installed, the head in blocks stays; the kernel is compared with it
before it is used.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from torchrl_grpo.models.head import HeadOptions

_CAPABILITY = (9, 0)


def suits(weight: Tensor, bias: Tensor | None, options: HeadOptions) -> bool:
    """Whether Liger's kernel is installed and made for this head.

    Args:
        weight: ``[V, H]``.
        bias: ``[V]`` or None.
        options: of the head.
    """
    made_for = options.dtype == torch.bfloat16 and bias is None and options.softcap is None
    if not made_for or not weight.is_cuda or torch.cuda.get_device_capability(weight.device) != _CAPABILITY:
        return False
    # Liger without its compiler for kernels would compute whole rows of logits with torch.
    return all(importlib.util.find_spec(name) is not None for name in ("liger_kernel", "cutlass"))


def score_tokens(
    hidden: Tensor, targets: Tensor, weight: Tensor, options: HeadOptions
) -> tuple[Tensor, Tensor]:
    """As :func:`~torchrl_grpo.models.head.score_tokens`.

    Args:
        hidden: ``[N, H]``, N at least 1.
        targets: ``[N]`` int64.
        weight: ``[V, H]``.
        options: without a cap.

    Returns:
        Log-probability and entropy in nats, both ``[N]`` float32.
    """
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

    operands = hidden.to(options.dtype), weight.to(options.dtype), targets
    surprise, entropy = LigerFusedLinearScaledCrossEntropyFunction.apply(
        *operands, options.temperature, return_entropy=True
    )
    return -surprise, (entropy if options.entropy_gradient else entropy.detach()).float()
