"""The reference model: frozen, loaded from where the policy came from."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from torchrl_grpo.config import Config
from torchrl_grpo.models import loading
from torchrl_grpo.models.precision import choose_kernels, resolve_dtype, resolve_head
from torchrl_grpo.models.scoring.token_scorer import TokenScorer


def load_reference(
    cfg: Config,
    source: str,
    device: torch.device,
    autocast_dtype: torch.dtype | None,
    shares_prefix: bool,
) -> TokenScorer:
    """A scorer around a frozen copy of the model.

    Args:
        cfg: ``ref_model``, ``model``, ``train_model.fused_head``, ``train_model.head_dtype`` and the sampling
            temperature are read.
        source: folder or hub name of the model.
        device: where it is loaded.
        autocast_dtype: that the trainer computes matrix products in, as the reference does unless it is held
            in 16 bits throughout; None is float32.
        shares_prefix: whether a prompt is run once per group.
    """
    choose_kernels()
    # Equal weights must have no divergence: auto computes as the policy does, in float32 under its autocast.
    auto = cfg.ref_model.dtype == "auto"
    dtype = torch.float32 if auto else resolve_dtype(cfg.ref_model.dtype, device)
    instead = "write ref_model.dtype=bfloat16, or give it a device of its own with ref_model.devices"
    model = loading.load_model(source, cfg.model, device, dtype, instead=instead).requires_grad_(False)
    autocast = autocast_dtype if dtype == torch.float32 else None
    # In 16 bits, most steps of a slow average round to nothing.
    if auto and autocast is not None and cfg.ref_model.refresh_mix == 1:
        hold_as_computed(model, autocast)
    # As the policy's head: two ways to round would be a divergence of equal models.
    head_dtype = resolve_head(cfg.train_model.head_dtype)
    temperature = cfg.inference_model.temperature
    scorer = TokenScorer(model, temperature, autocast, shares_prefix, head_dtype=head_dtype)
    if cfg.train_model.fused_head:
        # Likewise.
        scorer.fuse_head()
    return scorer


def hold_as_computed(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Hold the matrices of a frozen float32 model in the format that autocast casts them to for each product.

    The numbers stay the same to the last bit, at half the memory. What is not only multiplied with (norms,
    embeddings) stays in float32, and so does the output head, which the loss computes in a way of its own.

    Args:
        model: in float32; changed in place.
        dtype: autocast's.
    """
    head = model.get_output_embeddings()
    for module in model.modules():
        # A subclass may do more than multiply.
        if type(module) is nn.Linear and module is not head:
            module.to(dtype)
