"""What the processor of this machine can do."""

from __future__ import annotations

import torch


def multiplies_in_bfloat16() -> bool:
    """Whether products in bfloat16 are fast enough for a whole run of SmolLM2, which takes AVX-512 on x86.

    Without it they take ten to a hundred times as long as in float32.
    """
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
