"""The output head with Liger's fused kernel, which stores no logits in the forward pass.

Like :mod:`~torchrl_grpo.models.scoring.head`, it computes log-probability and entropy of each token with
gradients of both. It supports GPUs of compute capability 9.0 (H100, H200) and bfloat16, without bias and cap.
The kernel rounds the entropy to bfloat16, and also the gradient of the weight after every 1,024 tokens.

``train_model.fused_head=true`` asks for it. The head in blocks is used in all other cases: on other devices,
if Liger is not installed, and if the head is frozen as with adapters, where the kernel would compute its
gradient in vain. The kernel is compared with the head in blocks before it is used.
"""

from __future__ import annotations

import importlib.util
import math
from contextlib import nullcontext

import torch
from torch import Tensor

from torchrl_grpo.errors import first_line
from torchrl_grpo.models.scoring import head as blocks
from torchrl_grpo.models.scoring.head import HeadOptions
from torchrl_grpo.runtime.oom import ran_out_of_memory

_CAPABILITY = (9, 0)
# Tokens of the trial: three blocks of 1,024 tokens of the backward pass, the last one partly filled.
_TRIED = 2100
# Relative tolerance. Neighboring bfloat16 numbers differ by up to 1/128 of their size.
_TOLERANCE = 0.03


def supports(weight: Tensor, bias: Tensor | None, options: HeadOptions) -> bool:
    """Whether Liger's kernel is installed and supports this head.

    Args:
        weight: ``[V, H]``.
        bias: ``[V]`` or None.
        options: options of the head.
    """
    plain = bias is None and options.softcap is None and not options.blocked
    supported = options.dtype == torch.bfloat16 and plain
    if not supported or not weight.is_cuda or torch.cuda.get_device_capability(weight.device) != _CAPABILITY:
        return False
    # Without its kernel compiler (cutlass), Liger would compute full rows of logits with torch.
    return all(importlib.util.find_spec(name) is not None for name in ("liger_kernel", "cutlass"))


def score_tokens(
    hidden: Tensor, targets: Tensor, weight: Tensor, options: HeadOptions
) -> tuple[Tensor, Tensor]:
    """Compute :func:`~torchrl_grpo.models.scoring.head.score_tokens` with Liger's kernel.

    Args:
        hidden: ``[N, H]``, with N at least 1.
        targets: ``[N]`` int64.
        weight: ``[V, H]``.
        options: options of the head, without a cap.

    Returns:
        Log-probability and entropy in nats, both ``[N]`` float32.
    """
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

    operands = hidden.to(options.dtype), weight.to(options.dtype), targets
    # Kernels of Triton and CuTe start on the current device, which may not be that of their operands: a
    # reference model has a GPU of its own.
    with torch.cuda.device(weight.device) if weight.is_cuda else nullcontext():
        surprise, entropy = LigerFusedLinearScaledCrossEntropyFunction.apply(
            *operands, options.temperature / options.scale, return_entropy=True
        )
    return -surprise, (entropy if options.entropy_gradient else entropy.detach()).float()


def failure_reason(weight: Tensor, options: HeadOptions) -> str | None:
    """Compare the kernel with the head in blocks on random states.

    Args:
        weight: ``[V, H]``. Its gradient is compared if it requires one.
        options: options of the head.

    Returns:
        The reason not to use the kernel, or None if its numbers are correct.
    """
    words, width = weight.shape
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(_TRIED, width, generator=generator).to(weight.device)
    targets = torch.randint(words, (_TRIED,), generator=generator).to(weight.device)
    # Slopes differ between tokens. Otherwise a kernel that used the same gradient for all would pass.
    slopes = torch.randn(2, _TRIED, generator=generator).to(weight.device)

    def numbers(fused: bool) -> dict[str, Tensor]:
        states = hidden.clone().requires_grad_(weight.requires_grad)
        log_probs, entropy = (
            score_tokens(states, targets, weight, options)
            if fused
            else blocks.score_tokens(states, targets, weight, None, options)
        )
        tensors = {"log-probabilities": log_probs.detach(), "entropies": entropy.detach()}
        if weight.requires_grad:
            loss = (slopes[0] * log_probs).sum() + (slopes[1] * entropy).sum()
            tensors["gradients of states"], tensors["gradient of the head"] = torch.autograd.grad(
                loss, (states, weight)
            )
        return tensors

    expected = numbers(fused=False)
    try:
        actual = numbers(fused=True)
    except Exception as error:
        # The kernel's compiler has its own error types. The caller reports the message.
        if ran_out_of_memory(error):
            raise
        return first_line(error)
    gaps = {name: float((actual[name] - right).norm() / right.norm()) for name, right in expected.items()}
    # NaN and infinity count as wrong.
    wrong = [name for name, gap in gaps.items() if not (math.isfinite(gap) and gap <= _TOLERANCE)]
    return f"its {wrong[0]} would differ by {gaps[wrong[0]]:.2g} of their size" if wrong else None
