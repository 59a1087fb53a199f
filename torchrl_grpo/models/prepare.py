"""What a model needs before it is trained: no dropout, and gradient checkpointing where asked."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from torchrl_grpo.config import TrainModelConfig
from torchrl_grpo.errors import ModelError
from torchrl_grpo.models.logprobs import check_head

# Rounding of a float32 head; anything beyond means the model's forward does more than its head.
_HEAD_TOLERANCE = 1e-2


def prepare_for_training(model: PreTrainedModel, cfg: TrainModelConfig) -> None:
    """Set ``model`` up in place.

    Dropout is switched off: the ratio of new to old policy must come from the update, not from a mask.

    Raises:
        ModelError: its log-probabilities cannot be computed from backbone and head.
    """
    model.eval()
    gap = check_head(model)
    if gap > _HEAD_TOLERANCE:
        raise ModelError(
            f"{type(model).__name__}: its logits differ by {gap:.3g} from its output head applied to its "
            "last hidden state, so its forward scales or shifts them in a way this version does not "
            "know; choose another model.name"
        )
    if not cfg.gradient_checkpointing:
        return
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # Transformers recomputes activations in training mode only; attention's own dropout is a config value.
    model.config.attention_dropout = 0.0
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    model.train()
