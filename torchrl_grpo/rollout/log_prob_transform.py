"""Log-probabilities of the responses under another model than the engine's, written on the way in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import torch
from tensordict import TensorDictBase, lazy_stack
from torch import Tensor, nn
from torchrl.envs.transforms import Transform

from torchrl_grpo.batch.micro_batches import MicroBatch, TokenBudget, partition_balanced
from torchrl_grpo.batch.schema import picture_inputs, sampled_mask, set_rows
from torchrl_grpo.models.saving import Named
from torchrl_grpo.models.scoring.token_scorer import TokenScorer, output_head

# What a teacher writes beside the log-probability of each sampled token.
CANDIDATES = ("tokens", "candidates")
CANDIDATE_LOG_PROBS = ("log_probs", "candidates")
# What a teacher reads in place of the policy's prompt. It is gone once the teacher has scored the round.
TEACHER_PROMPT, TEACHER_PROMPT_MASK = ("tokens", "teacher_prompt"), ("masks", "teacher_prompt")


def score_piece(network: nn.Module, piece: TensorDictBase) -> Tensor:
    """Log-probabilities ``[P, G, T]`` of the sampled tokens of a micro-batch, 0 for others.

    They are on the model's device. Copy them after the last micro-batch, because a copy waits for the GPU.

    Args:
        network: a :class:`TokenScorer`, or what several ranks call in its place.
        piece: groups, see :mod:`~torchrl_grpo.batch.schema`.
    """
    log_probs: Tensor = network(*_inputs(piece), **picture_inputs(piece)).log_probs
    return log_probs


def _inputs(piece: TensorDictBase) -> tuple[Tensor, ...]:
    return (
        piece["tokens", "prompt"],
        piece["masks", "prompt"],
        piece["tokens", "response"],
        piece["masks", "response"],
        sampled_mask(piece),
    )


def write_rows(rows: Sequence[Tensor], micro: MicroBatch, values: Tensor) -> None:
    """Write the values of a micro-batch into those of its groups.

    Args:
        rows: values of each group of the batch, ``[G, ..., T]``.
        micro: the micro-batch.
        values: ``[P, G, ..., T]`` of its P groups and G responses each, 0 on padding.
    """
    for row, part in zip(micro.rows, values.cpu(), strict=True):
        width = min(part.shape[-1], rows[row].shape[-1])
        rows[row][micro.samples, ..., :width] = part[..., :width]


class LogProbWriter(Transform, ABC):
    """Write-side transform that adds ``("log_probs", name)`` ``[P, G, T]``; subclasses compute it.

    Args:
        name: name of what is written.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    @abstractmethod
    def compute(self, groups: TensorDictBase) -> list[Tensor]:
        """Log-probabilities ``[G, T]`` of the responses of each group."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return what is read as it is."""
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return set_rows(tensordict, ("log_probs", self.name), self.compute(tensordict))


class LogProbScorer(LogProbWriter):
    """Log-probabilities under a model of this process, on one device or on several.

    ``reference`` is a frozen model, for the KL divergence; ``proximal`` the trained one as it is when a round
    comes in (decoupled PPO, arXiv 2110.00641, sec. 3). Both run before the advantages are computed, so the
    divergence may enter the reward.

    Args:
        scorer: scorer of the model, at the sampling temperature.
        name: key under ``log_probs`` that is written.
        budget: bound on the tokens scored at a time.
        stance: entered around the scoring of a round, e.g. to switch a model's adapters off.
        others: the same model on further devices, each with a budget of its own; the groups are divided among
            all of them by cost, and scored at the same time.
        top_k: number of the model's most probable tokens that are written too for each token, as
            ``("tokens"|"log_probs", "candidates")`` ``[P, G, K, T]``. It is lowered to the number of tokens.
        vocabulary: those tokens have smaller ids; None for all that the model has.
    """

    def __init__(
        self,
        scorer: TokenScorer,
        name: str,
        budget: TokenBudget,
        stance: Callable[[], AbstractContextManager[None]] = nullcontext,
        others: Sequence[tuple[TokenScorer, TokenBudget]] = (),
        top_k: int = 0,
        vocabulary: int | None = None,
    ) -> None:
        super().__init__(name)
        # Not submodules: the buffer must not list the models among its parameters.
        self.__dict__["scorer"] = scorer
        self.__dict__["scorers"] = [(scorer, budget), *others]
        self.budget = budget
        self.stance = stance
        if top_k:
            tokens = len(output_head(scorer.model).weight)
            top_k = min(top_k, tokens if vocabulary is None else min(tokens, vocabulary))
        self.top_k = top_k
        self.vocabulary = vocabulary

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        groups = tensordict
        if TEACHER_PROMPT in tensordict.keys(include_nested=True):
            groups = lazy_stack([group.clone(recurse=False) for group in tensordict.unbind(0)])
            for group in groups.unbind(0):
                group["tokens", "prompt"] = group.pop(TEACHER_PROMPT)
                group["masks", "prompt"] = group.pop(TEACHER_PROMPT_MASK)
            tensordict = tensordict.exclude(TEACHER_PROMPT, TEACHER_PROMPT_MASK)
        keys = ("log_probs", self.name), CANDIDATES, CANDIDATE_LOG_PROBS
        for key, rows in zip(keys, self._compute(groups), strict=False):
            tensordict = set_rows(tensordict, key, rows)
        return tensordict

    def compute(self, groups: TensorDictBase) -> list[Tensor]:
        """Log-probabilities ``[G, T]`` of the responses of each group."""
        return self._compute(groups)[0]

    def _compute(self, groups: TensorDictBase) -> list[list[Tensor]]:
        """Log-probabilities of the responses and, with ``top_k``, candidates and their log-probabilities."""
        shapes = [group["masks", "response"].shape for group in groups.unbind(0)]
        written = [[torch.zeros(shape) for shape in shapes]]
        if self.top_k:
            of_top = [(G, self.top_k, T) for G, T in shapes]
            written.append([torch.zeros(shape, dtype=torch.int64) for shape in of_top])
            written.append([torch.zeros(shape) for shape in of_top])

        # Gradients are switched off for a thread, not for the process.
        @torch.no_grad()
        def work(scorer: TokenScorer, budget: TokenBudget, rows: Sequence[int]) -> None:
            def score(micro: MicroBatch) -> tuple[MicroBatch, Sequence[Tensor]]:
                piece = micro.select(groups)
                if not self.top_k:
                    return micro, [score_piece(scorer, piece)]
                return micro, scorer.top_tokens(*_inputs(piece), count=self.top_k, vocabulary=self.vocabulary)

            share = [MicroBatch(tuple(rows), slice(None))] if rows else []
            for micro, parts in budget.run(groups, score, undo=lambda: None, pieces=share):
                for whole, part in zip(written, parts, strict=True):
                    write_rows(whole, micro, part)

        shares = partition_balanced(self.budget.costs(groups), len(self.scorers))
        scorers, budgets = zip(*self.scorers, strict=True)
        with self.stance():
            if len(shares) == 1:
                # Not in a thread of its own, for which OpenMP would start another team of threads.
                work(self.scorer, self.budget, *shares)
            else:
                with ThreadPoolExecutor(len(shares)) as threads:
                    list(threads.map(work, scorers, budgets, shares))
        return written

    @torch.no_grad()
    def interpolate_toward(self, model: Named, share: float) -> None:
        """Move each weight w to ``(1 - share) w + share v``, v being ``model``'s (TR-DPO, arXiv 2404.09656).

        Args:
            model: of the same architecture.
            share: 1 copies it.
        """
        own = [dict(scorer.model.named_parameters()) for scorer, _ in self.scorers]
        # A model in shards hands its weights out one by one.
        for name, theirs in model.named_parameters():
            for weights in own:
                weights[name].lerp_(theirs.to(weights[name]), share)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take weights by name, for the model on every device."""
        for scorer, _ in self.scorers:
            scorer.model.load_state_dict(weights, strict=False)
