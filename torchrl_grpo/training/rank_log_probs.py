"""Log-probabilities of a round that the training ranks compute, each for a share of the groups."""

from __future__ import annotations

from collections.abc import Mapping

from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs.transforms import Transform

from torchrl_grpo.models.saving import Named
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.rollout.log_prob_transform import LogProbScorer, LogProbWriter
from torchrl_grpo.training.learner import Learner, Scored


def proximal_transforms(learner: Learner) -> list[Transform]:
    """Return the buffer transforms that write the proximal log-probabilities.

    The list is empty unless ``policy.proximal=trainer`` and a round has several optimizer steps.

    Args:
        learner: rank 0's learner.
    """
    if learner.cfg.policy.proximal != "trainer" or learner.steps_per_round == 1:
        return []
    if learner.ranks.size == 1:
        return [LogProbScorer(learner.scorer, "proximal", learner.budget)]
    return [DistributedLogProbs(learner, "proximal", of="policy")]


class DistributedLogProbs(LogProbWriter):
    """Log-probabilities that several ranks compute together.

    Args:
        learner: rank 0's learner.
        name: see :class:`LogProbWriter`.
        of: see :meth:`Learner.log_probs`.
    """

    def __init__(self, learner: Learner, name: str, of: Scored) -> None:
        super().__init__(name)
        # Not a submodule: the buffer must not list the model among its parameters.
        self.__dict__["learner"] = learner
        self._of = of

    def compute(self, groups: TensorDictBase) -> list[Tensor]:
        learner: Learner = self.__dict__["learner"]
        return learner.log_probs(groups, self._of)


class DistributedReference(DistributedLogProbs):
    """Log-probabilities under a reference model of which each rank has a copy.

    Args:
        learner: rank 0's learner, whose ranks have loaded their copies.
    """

    def __init__(self, learner: Learner) -> None:
        super().__init__(learner, "reference", "reference")

    @property
    def scorer(self) -> TokenScorer:
        """Rank 0's copy, which all others equal."""
        reference: TokenScorer = self.__dict__["learner"].reference
        return reference

    def interpolate_toward(self, model: Named, share: float) -> None:
        """See :meth:`LogProbScorer.interpolate_toward`. Each rank reads its own policy."""
        learner: Learner = self.__dict__["learner"]
        learner.ranks.call_all(Learner.move_reference, learner, share)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Do nothing: each rank has taken them in :meth:`Learner.resume`."""
