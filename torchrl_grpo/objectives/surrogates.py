"""What is maximized per token, by name: each surrogate is one function, and adding one is adding a function.

Every function takes

    log_ratio   log of the policy's probability over the proximal policy's, at the level of ``policy.ratio``;
    log_prob    log-probability of the token under the policy, with its gradient;
    advantage   broadcastable to both;
    bounds      of the ratio, see :class:`Bounds`;

and, by name, options of its own with their defaults, which ``policy.surrogate_args`` sets. It returns the
objective of each token and a bool tensor that is True where the bounds cut the ratio, or None where nothing
cuts it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

# Beyond e^20 a ratio says only that two models disagree completely; the bound keeps it finite.
MAX_LOG_RATIO = 20.0


class Bounds(NamedTuple):
    """Where ratios are cut.

    Attributes:
        low: how far below 1 the ratio may fall; 1 is no bound.
        high: how far above 1 it may rise.
        dual: with a negative advantage the objective is no less than this times it; None is no bound.
    """

    low: float
    high: float
    dual: float | None = None


Surrogate = Callable[..., "tuple[Tensor, Tensor | None]"]
SURROGATES: dict[str, Surrogate] = {}


def _named(function: Surrogate) -> Surrogate:
    SURROGATES[function.__name__] = function
    return function


def exp_bounded(log_ratio: Tensor) -> Tensor:
    """``exp``, finite whatever comes in."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@_named
def clip(log_ratio: Tensor, log_prob: Tensor, advantage: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """PPO's clipped objective (arXiv 1707.06347, eq. 7; two bounds: DAPO, 2503.14476, eq. 10).

    ``min(r A, clip(r, 1 - low, 1 + high) A)``; with ``dual``, ``max(that, dual A)`` where A < 0 (dual-clip
    PPO, 1912.09729, eq. 5).
    """
    ratio = exp_bounded(log_ratio)
    bounded = ratio.clamp(1 - bounds.low, 1 + bounds.high)
    objective = (ratio * advantage).minimum(bounded * advantage)
    clipped = ((advantage > 0) & (ratio > 1 + bounds.high)) | ((advantage < 0) & (ratio < 1 - bounds.low))
    if bounds.dual is not None:
        objective = objective.where(advantage >= 0, objective.maximum(bounds.dual * advantage))
        clipped = clipped | ((advantage < 0) & (ratio > bounds.dual))
    return objective, clipped


@_named
def cispo(log_ratio: Tensor, log_prob: Tensor, advantage: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """CISPO (MiniMax-M1, arXiv 2506.13585, eqs. 4 and 5): ``sg(clip(r, 1 - low, 1 + high)) A log pi``.

    A token whose ratio is cut keeps its gradient, weighted by the bound.
    """
    ratio = exp_bounded(log_ratio).detach()
    bounded = ratio.clamp(1 - bounds.low, 1 + bounds.high)
    return bounded * advantage * log_prob, bounded != ratio


@_named
def log_likelihood(
    log_ratio: Tensor, log_prob: Tensor, advantage: Tensor, bounds: Bounds
) -> tuple[Tensor, None]:
    """``A log pi``, without a ratio: REINFORCE, or a weighted likelihood where A is a weight."""
    return advantage * log_prob, None


@_named
def sapo(
    log_ratio: Tensor,
    log_prob: Tensor,
    advantage: Tensor,
    bounds: Bounds,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> tuple[Tensor, None]:
    """Soft gates instead of a clip (SAPO, arXiv 2511.20347, eqs. 5 and 6): ``4 / t sigmoid(t (r - 1)) A``.

    ``t`` is ``temperature_positive`` where A > 0 and ``temperature_negative`` elsewhere. The gate's slope is
    1 at r = 1 and falls off on both sides; nothing is ever cut.
    """
    # In the advantages' own precision, which a bool times a number would not be.
    positive = (advantage > 0).to(advantage.dtype)
    temperature = positive * temperature_positive + (1 - positive) * temperature_negative
    gate = 4 / temperature * (temperature * (exp_bounded(log_ratio) - 1)).sigmoid()
    return gate * advantage, None
