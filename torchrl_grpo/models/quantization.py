"""A frozen base in 4 bits (QLoRA, arXiv 2305.14314) by bitsandbytes, which is imported only where it is used.

NF4 with double quantization: a matrix takes about half a byte a weight; embeddings and output head stay as
they are. It computes with the numbers that its bits stand for, and these are what is published. Left out: 8
bits, and bases that were saved quantized.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel


def loading_options(kind: str, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """What ``from_pretrained`` is told so that matrices arrive on ``device`` quantized.

    Args:
        kind: ``train_model.quantization``.
        device: where the model runs.
        dtype: that matrix products compute in.
    """
    if kind == "none":
        return {}
    quantized = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": quantized, "device_map": {"": device}}


def is_quantized(parameter: Tensor) -> bool:
    """Whether a parameter holds packed bits and not numbers."""
    return not parameter.is_floating_point()


def plain_weight(layer: nn.Module) -> Tensor:
    """The layer's weight as the numbers it computes with; a quantized one is unpacked into a new tensor."""
    from peft.utils.integrations import dequantize_module_weight

    weight = dequantize_module_weight(layer)
    assert isinstance(weight, Tensor)
    return weight.detach()


def keep_packing(model: PreTrainedModel) -> None:
    """Keep bitsandbytes from packing weights anew, in place, for a CPU's kernels when a layer is run.

    It does so in evaluation mode, and then they cannot be unpacked as they must be for publication; a linear
    layer has no other use of the mode.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear) and is_quantized(module.weight):
            module.train()
