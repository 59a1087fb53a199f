"""A frozen base model in 4 bits (QLoRA, arXiv 2305.14314), with bitsandbytes, which is imported on use only.

The format is NF4 with double quantization, which takes about half a byte per weight of a matrix. Embeddings
and output head are not quantized. The dequantized weights are used in computations and are published. 8 bits
and models that were saved quantized are not supported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel


def loading_options(kind: str, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return the options of ``from_pretrained`` that load quantized matrices on ``device``.

    Args:
        kind: ``train_model.quantization``.
        device: device of the model.
        dtype: dtype of matrix products.
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
    """Whether a parameter holds packed bits instead of floating-point numbers."""
    return not parameter.is_floating_point()


def dequantized_weight(layer: nn.Module) -> Tensor:
    """Return the weight of a layer, detached. A quantized weight is dequantized to a new tensor."""
    from peft.utils.integrations import dequantize_module_weight

    weight = dequantize_module_weight(layer)
    assert isinstance(weight, Tensor)
    return weight.detach()


def keep_packing(model: PreTrainedModel) -> None:
    """Keep bitsandbytes from repacking weights in place for CPU kernels when a layer runs.

    It repacks them in evaluation mode, and then they cannot be unpacked for publication. So quantized layers
    are set to training mode, which has no other effect on a linear layer.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear) and is_quantized(module.weight):
            module.train()
