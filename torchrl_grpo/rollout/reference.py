"""The reference scorer: log-probabilities of the responses under a frozen model, written on the way in."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torchrl.envs.transforms import Transform

from torchrl_grpo.models.logprobs import TokenScorer


class ReferenceScorer(Transform):
    """Write-side transform that adds ``("log_probs", "reference")`` ``[P, G, T]``.

    It runs before the advantages are computed, so the KL to the reference may enter the reward.

    Args:
        scorer: around the reference model, at the sampling temperature.
        groups_per_call: groups scored at a time.
    """

    def __init__(self, scorer: TokenScorer, groups_per_call: int = 8) -> None:
        super().__init__()
        # Not a submodule: the buffer must not list the reference model among its parameters.
        self.__dict__["scorer"] = scorer
        self.groups_per_call = groups_per_call

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Reading changes nothing."""
        return tensordict

    @torch.no_grad()
    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        scores = [
            self.scorer(
                piece["tokens", "prompt"],
                piece["masks", "prompt"],
                piece["tokens", "response"],
                piece["masks", "response"],
            ).log_probs.cpu()
            for piece in tensordict.split(self.groups_per_call)
        ]
        return tensordict.set(("log_probs", "reference"), torch.cat(scores))
