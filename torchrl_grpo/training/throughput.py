"""Where a step's time went, and how near training came to what this machine can multiply."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor
from transformers import PreTrainedModel

from torchrl_grpo.batch.schema import token_counts
from torchrl_grpo.models.flops import FlopCounter, gemm_rate
from torchrl_grpo.models.lora import is_adapter
from torchrl_grpo.models.shards import count_parameters

# What a step is made of; the rest is time/other_s.
PHASES = ("generate", "score", "wait", "prepare", "train", "publish", "eval")


class Speedometer:
    """Throughput of the training phase.

    Args:
        model: model that is trained.
        device: device of the model.
        dtype: dtype of its matrix products.
        ranks: number of ranks that train together, each on a device like this one.
    """

    def __init__(
        self, model: PreTrainedModel, device: torch.device, dtype: torch.dtype, ranks: int = 1
    ) -> None:
        self._ranks = ranks
        self._operations = FlopCounter(model)
        adapters = sum(p.numel() for name, p in model.named_parameters() if is_adapter(name))
        self._parameters = count_parameters(model) - adapters
        self.gemm_rate = gemm_rate(device, dtype, model.config.get_text_config().hidden_size)

    def trained(self, batch: TensorDictBase, has_gradient: Tensor, seconds: float) -> dict[str, float]:
        """Metrics of an optimizer step that took ``seconds``; none where the loss counts no token.

        Args:
            batch: the groups trained on, ``[P]``.
            has_gradient: ``[P]`` bool, groups that went through a backward pass too.
            seconds: of the training phase.
        """
        used = batch["masks", "loss"].any(-1).any(-1)
        if not used.any():
            return {}
        batch, has_gradient = batch[used], has_gradient[used]
        operations = tokens = 0.0
        for groups, backward in ((batch[has_gradient], True), (batch[~has_gradient], False)):
            prompts, responses = token_counts(groups)
            operations += self._operations(prompts, responses, backward=backward)
            tokens += sum(prompts) + sum(map(sum, responses))
        rate = operations / seconds
        return {
            "throughput/trained_tokens_per_s": tokens / seconds,
            "throughput/train_flops_per_s": rate,
            "throughput/train_gemm_share": rate / (self._ranks * self.gemm_rate),
        }

    def published(self, seconds: float) -> dict[str, float]:
        """Metrics of a publication that took ``seconds``."""
        return {
            "time/publish_s": seconds,
            "throughput/published_parameters_per_s": self._parameters / seconds,
        }


def rest_of(metrics: dict[str, float]) -> float:
    """Seconds of the step in ``metrics`` that none of its phases took."""
    return metrics["time/step_s"] - sum(metrics.get(f"time/{phase}_s", 0.0) for phase in PHASES)
