"""The reference model: frozen, loaded from where the policy came from."""

from __future__ import annotations

import torch

from torchrl_grpo.config import Config
from torchrl_grpo.models import loading
from torchrl_grpo.models.logprobs import TokenScorer
from torchrl_grpo.models.precision import resolve_dtype


def load_reference(
    cfg: Config,
    source: str,
    device: torch.device,
    autocast_dtype: torch.dtype | None,
    shares_prefix: bool,
) -> TokenScorer:
    """A scorer around a frozen copy of the model.

    Args:
        cfg: ``ref_model``, ``model``, ``train_model.fused_head`` and the sampling temperature are read.
        source: folder or hub name of the model.
        device: where it is loaded.
        autocast_dtype: the trainer's number format, used where the reference is in float32 as well.
        shares_prefix: whether a prompt is run once per group.
    """
    dtype = resolve_dtype(cfg.ref_model.dtype, device)
    if cfg.ref_model.dtype == "auto" and cfg.ref_model.refresh_mix < 1:
        # In 16 bits, most steps of a slow average round to nothing.
        dtype = torch.float32
    model = loading.load_model(
        source,
        cfg.model,
        device,
        dtype,
        instead="write ref_model.dtype=bfloat16, or give it a device of its own with ref_model.devices",
    ).requires_grad_(False)
    autocast = autocast_dtype if dtype == torch.float32 else None
    scorer = TokenScorer(model, cfg.inference_model.temperature, autocast, shares_prefix)
    if cfg.train_model.fused_head:
        # As the policy: two ways to round would be a divergence of equal models.
        scorer.fuse_head()
    return scorer
