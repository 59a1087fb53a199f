"""Log-probabilities of the responses under another model than the engine's, written on the way in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from tensordict import TensorDictBase
from torchrl.envs.transforms import Transform

from torchrl_grpo.models.logprobs import TokenScorer
from torchrl_grpo.models.saving import Named
from torchrl_grpo.rollout.micro_batches import MicroBatch, TokenBudget


class LogProbScorer(Transform):
    """Write-side transform that adds ``("log_probs", name)`` ``[P, G, T]``.

    ``reference`` is a frozen model, for the KL divergence; ``proximal`` the trained one as it is when a round
    comes in (decoupled PPO, arXiv 2110.00641, sec. 3). Both run before the advantages are computed, so the
    divergence may enter the reward.

    Args:
        scorer: around the model, at the sampling temperature.
        name: of what is written.
        budget: how much is scored at a time.
        stance: entered around the scoring of a round, e.g. to switch a model's adapters off.
    """

    def __init__(
        self,
        scorer: TokenScorer,
        name: str,
        budget: TokenBudget,
        stance: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__()
        # Not a submodule: the buffer must not list the model among its parameters.
        self.__dict__["scorer"] = scorer
        self.name = name
        self.budget = budget
        self.stance = stance

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Reading changes nothing."""
        return tensordict

    @torch.no_grad()
    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        written = torch.zeros(tensordict["masks", "response"].shape)

        def score(micro: MicroBatch) -> None:
            piece = micro.of(tensordict)
            found = self.scorer(
                piece["tokens", "prompt"],
                piece["masks", "prompt"],
                piece["tokens", "response"],
                piece["masks", "response"],
            ).log_probs.cpu()
            written[list(micro.rows), micro.samples, : found.shape[-1]] = found

        with self.stance():
            # An attempt that is repeated writes over what the last one left.
            self.budget.run(tensordict, score, undo=lambda: None)
        return tensordict.set(("log_probs", self.name), written)

    @torch.no_grad()
    def mix_in(self, model: Named, share: float) -> None:
        """Move each weight w to ``(1 - share) w + share v``, v being ``model``'s (TR-DPO, arXiv 2404.09656).

        Args:
            model: of the same architecture.
            share: 1 copies it.
        """
        others = dict(model.named_parameters())
        for name, weight in self.scorer.model.named_parameters():
            weight.lerp_(others[name].to(weight), share)
