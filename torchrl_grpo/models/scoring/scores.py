"""The scores of response tokens, and where they are in a padded batch.

Axes: ``P`` prompts, ``G`` responses per prompt, ``T`` response tokens, ``S`` scored response tokens, ``K``
candidates for the place of a token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TokenScores(NamedTuple):
    """Scores of response tokens. Entries are zero where the response mask is False.

    Attributes:
        log_probs: log-probabilities in nats at the sampling temperature, ``[P, G, T]`` float32.
        entropy: entropies in nats, ``[P, G, T]`` float32, with a gradient only if ``entropy_gradient`` is
            set.
    """

    log_probs: Tensor
    entropy: Tensor


class CandidateScores(NamedTuple):
    """Scores of response tokens, and of candidates for their places.

    Attributes:
        log_probs: see :class:`TokenScores`.
        entropy: see :class:`TokenScores`.
        candidates: log-probabilities of the candidates, ``[P, G, K, T]`` float32.
    """

    log_probs: Tensor
    entropy: Tensor
    candidates: Tensor


class TopScores(NamedTuple):
    """Scores of response tokens, and of the most probable tokens for their places.

    Attributes:
        log_probs: see :class:`TokenScores`.
        candidates: the K most probable tokens of each place, ``[P, G, K, T]`` int64.
        candidate_log_probs: their log-probabilities, ``[P, G, K, T]`` float32.
    """

    log_probs: Tensor
    candidates: Tensor
    candidate_log_probs: Tensor


class Places(NamedTuple):
    """Index vectors of the tokens that are scored.

    Attributes:
        targets: token ids ``[S]``, or ``[S (1 + K)]`` with the candidates of a token behind it.
        columns: 1, or 1 + K.
        places: positions ``[S]`` in the flattened ``[P, G, T]``.
        among: positions ``[S]`` among all response tokens; None if all are scored.
    """

    targets: Tensor
    columns: int
    places: Tensor
    among: Tensor | None

    def by_column(self) -> Tensor:
        """Return the targets as ``[S, 1 + K]``."""
        return self.targets.view(-1, self.columns)


def targets_of(response: Tensor, scored: Tensor, candidates: Tensor | None) -> Tensor:
    """Return the tokens to score: those of ``response`` ``[P, G, T]``, each with its candidates behind it."""
    if candidates is None:
        return response[scored]
    columns = torch.cat([response[:, :, None], candidates.cpu()], 2)
    return columns.transpose(2, 3)[scored].flatten()


def scatter(values: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
    """Put ``values`` at the flat positions ``places`` of zeros.

    Args:
        values: ``[S]``, or ``[S, C]``.
        places: ``[S]``, positions in the flattened ``[P, G, T]``.
        shape: ``[P, G, T]``.

    Returns:
        ``[P, G, T]``, or ``[P, G, C, T]``.
    """
    more = values.shape[1:]
    zeros = torch.zeros(shape.numel(), *more, dtype=values.dtype, device=values.device)
    scattered = zeros.index_copy(0, places, values).view(*shape, *more)
    return scattered.transpose(2, 3) if more else scattered
