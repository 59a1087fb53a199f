"""The output head by Liger's fused kernel, which keeps no logits in the forward pass.

It computes what :mod:`~torchrl_grpo.models.scoring.head` does, log-probability and entropy of each token with
a gradient for both, on GPUs of compute capability 9.0 (H100, H200) in bfloat16, without bias and cap. Entropy
comes rounded to bfloat16, and so is the weight's gradient after each 1,024 tokens. Everywhere else, where it
is not installed and where the head is frozen below adapters (the kernel would compute its gradient all the
same), the head in blocks stays; the kernel is compared with it before it is used.
"""

from __future__ import annotations

import importlib.util
import math

import torch
from torch import Tensor

from torchrl_grpo.models.scoring import head as blocks
from torchrl_grpo.models.scoring.head import HeadOptions
from torchrl_grpo.runtime.oom import ran_out_of_memory

_CAPABILITY = (9, 0)
# Beyond two of the 1,024 tokens that its backward pass takes at a time, the last of them partly filled.
_TRIED = 2100
# Relative, of numbers that are 1/256 of their size apart.
_TOLERANCE = 0.03


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
    """As :func:`~torchrl_grpo.models.scoring.head.score_tokens`.

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
        *operands, options.temperature / options.scale, return_entropy=True
    )
    return -surprise, (entropy if options.entropy_gradient else entropy.detach()).float()


def why_not(weight: Tensor, options: HeadOptions) -> str | None:
    """What speaks against the kernel with this head, tried on random states: None where the numbers hold.

    Args:
        weight: ``[V, H]``; its gradient is compared if it has one.
        options: of the head.
    """
    words, width = weight.shape
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(_TRIED, width, generator=generator).to(weight.device)
    targets = torch.randint(words, (_TRIED,), generator=generator).to(weight.device)
    # Different ones: a kernel that took each token's gradient for the same would not be found out.
    slopes = torch.randn(2, _TRIED, generator=generator).to(weight.device)

    def numbers(fused: bool) -> dict[str, Tensor]:
        states = hidden.clone().requires_grad_(weight.requires_grad)
        log_probs, entropy = (
            score_tokens(states, targets, weight, options)
            if fused
            else blocks.score_tokens(states, targets, weight, None, options)
        )
        found = {"log-probabilities": log_probs.detach(), "entropies": entropy.detach()}
        if weight.requires_grad:
            loss = (slopes[0] * log_probs).sum() + (slopes[1] * entropy).sum()
            found["gradients of states"], found["gradient of the head"] = torch.autograd.grad(
                loss, (states, weight)
            )
        return found

    expected = numbers(fused=False)
    try:
        found = numbers(fused=True)
    except Exception as error:
        # The kernel's compiler has errors of its own kinds: each of them is said, by the caller.
        if ran_out_of_memory(error):
            raise
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    gaps = {name: float((found[name] - one).norm() / one.norm()) for name, one in expected.items()}
    # What is no number is no gap that one may allow.
    wrong = [name for name, gap in gaps.items() if not (math.isfinite(gap) and gap <= _TOLERANCE)]
    return f"its {wrong[0]} would differ by {gaps[wrong[0]]:.2g} of their size" if wrong else None
