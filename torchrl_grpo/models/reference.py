"""The frozen reference model, loaded from the same weights as the policy."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from torchrl_grpo.config import Config
from torchrl_grpo.models import loading
from torchrl_grpo.models.precision import choose_kernels, resolve_dtype, resolve_head
from torchrl_grpo.models.scoring.fused_norm import fuse_norms
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.models.scoring.varlen_choice import choose_attention


def load_reference(
    cfg: Config,
    source: str,
    device: torch.device,
    autocast_dtype: torch.dtype | None,
    shares_prefix: bool,
) -> TokenScorer:
    """Load a scorer of a frozen copy of the model.

    Args:
        cfg: configuration; ``ref_model``, ``model``, the sampling temperature, and the keys ``fused_head``,
            ``head_dtype`` and ``prefix_attention`` of ``train_model`` are read.
        source: folder or hub name of the model.
        device: device of the model.
        autocast_dtype: dtype of the trainer's matrix products, or None for float32. The reference uses it
            too, unless ``ref_model.dtype`` is a 16-bit format.
        shares_prefix: whether a prompt is run once per group.

    Raises:
        ModelError: the model cannot be loaded.
        TrainingStopped: memory ran out.
    """
    choose_kernels()
    # Equal weights must have no divergence, so auto computes like the policy: float32 with its autocast.
    auto = cfg.ref_model.dtype == "auto"
    dtype = torch.float32 if auto else resolve_dtype(cfg.ref_model.dtype, device)
    instead = "write ref_model.dtype=bfloat16, or give it a device of its own with ref_model.devices"
    model = loading.load_model(source, cfg.model, device, dtype, instead=instead).requires_grad_(False)
    autocast = autocast_dtype if dtype == torch.float32 else None
    # In 16 bits, most updates of a slow moving average would round to nothing.
    if auto and autocast is not None and cfg.ref_model.refresh_mix == 1:
        hold_as_computed(model, autocast)
    fuse_norms(model)
    # The head must round like the policy's. Otherwise equal models would have a divergence.
    head_dtype = resolve_head(cfg.train_model.head_dtype)
    temperature = cfg.inference_model.temperature
    scorer = TokenScorer(model, temperature, autocast, shares_prefix, head_dtype=head_dtype)
    choose_attention(scorer, cfg.train_model.prefix_attention, cfg.inference_model.max_model_len)
    if cfg.train_model.fused_head:
        scorer.fuse_head()
    return scorer


def hold_as_computed(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Store the matrices of a frozen float32 model in the dtype to which autocast casts them.

    This halves the memory, and results stay the same to the last bit. Weights with other uses than products
    (norms, embeddings) stay in float32. So does the output head, which the loss computes separately.

    Args:
        model: float32 model, changed in place.
        dtype: dtype of autocast.
    """
    head = model.get_output_embeddings()
    for module in model.modules():
        # A subclass of nn.Linear may do more than multiply.
        if type(module) is nn.Linear and module is not head:
            module.to(dtype)
