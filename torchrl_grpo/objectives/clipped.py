"""The clipped policy-gradient loss over groups of responses, as a TorchRL ``LossModule``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.objectives import LossModule

from torchrl_grpo.models.logprobs import TokenScorer
from torchrl_grpo.objectives.kl import MAX_LOG_RATIO, kl_estimate


def clipped_surrogate(
    log_ratio: Tensor, advantage: Tensor, epsilon_low: float, epsilon_high: float
) -> tuple[Tensor, Tensor]:
    """PPO's clipped objective per token (arXiv 1707.06347, eq. 7; two bounds: DAPO, 2503.14476, eq. 10).

    ``min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A)`` with ``r = exp(log_ratio)``.

    Args:
        log_ratio: new minus old log-probability, any shape.
        advantage: broadcastable to it.
        epsilon_low: how far below 1 the ratio may fall.
        epsilon_high: how far above 1 it may rise.

    Returns:
        The objective (to be maximised), and a bool tensor that is True where the clip took the gradient away.
    """
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    bounded = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    clipped = ((advantage > 0) & (ratio > 1 + epsilon_high)) | ((advantage < 0) & (ratio < 1 - epsilon_low))
    return torch.minimum(ratio * advantage, bounded * advantage), clipped


class ClippedGroupLoss(LossModule):
    """``(kl_coef * sum KL - sum min(r A, clip(r) A)) / N`` over response tokens, N in the whole batch.

    TorchRL's ``GRPOLoss`` takes its means over a micro-batch and counts padding in its KL and its
    metrics; here every sum is divided by the token count of the whole optimiser batch, so the terms of
    all micro-batches add up to those of one large batch, and padding appears nowhere.

    Reads ``("tokens"|"masks", "prompt")`` ``[P, L]``, ``("tokens"|"masks"|"log_probs", "response")``
    ``[P, G, T]``, ``"advantage"`` ``[P, G, 1]`` and, with ``kl_coef``, ``("log_probs", "reference")``.

    Args:
        actor_network: scores responses, with gradients.
        clip_epsilon_low: see :func:`clipped_surrogate`.
        clip_epsilon_high: see :func:`clipped_surrogate`.
        kl_coef: weight of the KL term to the reference; 0 leaves it out.
        kl_estimator: see :func:`~torchrl_grpo.objectives.kl.kl_estimate`.
    """

    @dataclass
    class _AcceptedKeys:
        """Where the loss finds its inputs."""

        prompt: NestedKey = ("tokens", "prompt")
        prompt_mask: NestedKey = ("masks", "prompt")
        response: NestedKey = ("tokens", "response")
        response_mask: NestedKey = ("masks", "response")
        sample_log_prob: NestedKey = ("log_probs", "response")
        ref_log_prob: NestedKey = ("log_probs", "reference")
        advantage: NestedKey = "advantage"

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys
    actor_network: TokenScorer
    out_keys = (
        "loss_objective",
        "loss_kl",
        "entropy",
        "clip_fraction",
        "kl_approx",
        "ratio",
        "ratio_squared",
        "gap",
    )

    def __init__(
        self,
        actor_network: TokenScorer,
        *,
        clip_epsilon_low: float,
        clip_epsilon_high: float,
        kl_coef: float = 0.0,
        kl_estimator: str = "k3",
    ) -> None:
        super().__init__()
        # Parameters stay where they are: the optimiser and the checkpoints know the model by its own names.
        self.__dict__["actor_network"] = actor_network
        self.clip_epsilon_low = clip_epsilon_low
        self.clip_epsilon_high = clip_epsilon_high
        self.kl_coef = kl_coef
        self.kl_estimator = kl_estimator

    def _forward_value_estimator_keys(self, **kwargs: NestedKey) -> None:
        """There is no value network."""

    def forward(self, tensordict: TensorDictBase, total_tokens: int | None = None) -> TensorDict:
        """The loss terms of one micro-batch.

        Args:
            tensordict: a micro-batch ``[P]`` of groups.
            total_tokens: response tokens of the whole optimiser batch; this batch's own when omitted.

        Returns:
            Scalars. ``loss_objective`` and ``loss_kl`` add up to the loss and carry gradients. The rest are
            shares of a mean over ``total_tokens``, to be summed over micro-batches: ``entropy`` (nats),
            ``clip_fraction``, ``kl_approx`` (k3 of the sampling policy to this one), ``ratio``,
            ``ratio_squared``, ``gap`` (absolute difference of log-probabilities).
        """
        keys = self.tensor_keys
        mask = tensordict.get(keys.response_mask)
        scores = self.actor_network(
            tensordict.get(keys.prompt),
            tensordict.get(keys.prompt_mask),
            tensordict.get(keys.response),
            mask,
        )
        device = scores.log_probs.device
        mask = mask.to(device)
        count = int(mask.sum()) if total_tokens is None else total_tokens

        def share(values: Tensor) -> Tensor:
            return values.masked_fill(~mask, 0.0).sum() / count

        old = tensordict.get(keys.sample_log_prob).to(device)
        log_ratio = scores.log_probs - old
        surrogate, clipped = clipped_surrogate(
            log_ratio,
            tensordict.get(keys.advantage).to(device),
            self.clip_epsilon_low,
            self.clip_epsilon_high,
        )
        detached = log_ratio.detach()
        ratio = detached.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        out = {
            "loss_objective": -share(surrogate),
            "entropy": share(scores.entropy),
            "clip_fraction": share(clipped.float()),
            "kl_approx": share(kl_estimate(old, scores.log_probs.detach(), "k3")),
            "ratio": share(ratio),
            "ratio_squared": share(ratio.square()),
            "gap": share(detached.abs()),
        }
        if self.kl_coef != 0:
            reference = tensordict.get(keys.ref_log_prob).to(device)
            kl = share(kl_estimate(scores.log_probs, reference, self.kl_estimator))
            out["loss_kl"] = self.kl_coef * kl
            out["kl_ref"] = kl.detach()
        return TensorDict(out, batch_size=[])
