"""Names the phases of a step, and measures the throughput of training relative to a matrix product's."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor
from transformers import PreTrainedModel

from torchrl_grpo.batch.schema import token_counts
from torchrl_grpo.models.flops import FlopCounter, gemm_rate
from torchrl_grpo.models.lora import is_adapter
from torchrl_grpo.models.shards import count_parameters

# Phases of a step; the remaining time is time/other_s. Rewards are "score"; the log-probabilities of the
# reference and of the proximal policy, and advantages, are "prepare".
PHASES = ("generate", "score", "wait", "prepare", "train", "publish", "eval")


class ThroughputMeter:
    """Measures the throughput of the training phase and of publications.

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

    def training_metrics(
        self, batch: TensorDictBase, has_gradient: Tensor, seconds: float
    ) -> dict[str, float]:
        """Return the metrics of an optimizer step; none if the loss mask is empty.

        Args:
            batch: groups that were trained on, ``[P]``.
            has_gradient: mask of the groups that also had a backward pass, ``[P]``.
            seconds: duration of the training phase.
        """
        used = [bool(group["masks", "loss"].any()) for group in batch.unbind(0)]
        if not any(used):
            return {}
        counts = list(zip(used, has_gradient.tolist(), *token_counts(batch), strict=True))
        operations = tokens = 0.0
        for backward in (True, False):
            prompts = [prompt for counted, moves, prompt, _ in counts if counted and moves == backward]
            responses = [lengths for counted, moves, _, lengths in counts if counted and moves == backward]
            operations += self._operations(prompts, responses, backward=backward)
            tokens += sum(prompts) + sum(map(sum, responses))
        rate = operations / seconds
        return {
            "throughput/trained_tokens_per_s": tokens / seconds,
            "throughput/train_flops_per_s": rate,
            "throughput/train_gemm_share": rate / (self._ranks * self.gemm_rate),
        }

    def publication_metrics(self, seconds: float) -> dict[str, float]:
        """Return the metrics of a publication that took ``seconds``."""
        return {
            "time/publish_s": seconds,
            "throughput/published_parameters_per_s": self._parameters / seconds,
        }


def unattributed_seconds(metrics: dict[str, float]) -> float:
    """Return the seconds of a step that belong to none of its phases."""
    return metrics["time/step_s"] - sum(metrics.get(f"time/{phase}_s", 0.0) for phase in PHASES)
