"""Surrogate objectives per token. Each is one function, registered by its name.

Every function takes

    log_ratio   log-ratio of policy and proximal policy at the level of ``policy.ratio``, ``[P, G, T]``;
    log_prob    log-probability of the token under the policy, with gradient, ``[P, G, T]``;
    advantage   advantage, broadcastable to both, ``[P, G, 1]``;
    bounds      bounds of the ratio, see :class:`Bounds`;

and its own keyword options, which ``policy.surrogate_args`` sets. It returns the objective of each token, to
be maximized, and a bool tensor that is True where a bound clips the ratio, or None if nothing is clipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

# Beyond e^20 a ratio only means that two models disagree completely. The bound keeps it finite.
MAX_LOG_RATIO = 20.0


class Bounds(NamedTuple):
    """Bounds of the ratio.

    Attributes:
        low: distance of the lower bound below 1; 1 means no bound.
        high: distance of the upper bound above 1.
        dual: with a negative advantage the objective is at least ``dual`` times the advantage; None means no
            bound.
    """

    low: float
    high: float
    dual: float | None = None


Surrogate = Callable[..., "tuple[Tensor, Tensor | None]"]
SURROGATES: dict[str, Surrogate] = {}


def _register(function: Surrogate) -> Surrogate:
    SURROGATES[function.__name__] = function
    return function


def exp_bounded(log_ratio: Tensor) -> Tensor:
    """Return ``exp(log_ratio)``, bounded so that it is finite."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@_register
def clip(log_ratio: Tensor, log_prob: Tensor, advantage: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """PPO's clipped objective (arXiv 1707.06347, eq. 7; with two bounds: DAPO, 2503.14476, eq. 10).

    It is ``min(r A, clip(r, 1 - low, 1 + high) A)``. With ``dual`` and A < 0, it is the maximum of that and
    ``dual A`` (dual-clip PPO, 1912.09729, eq. 5).
    """
    ratio = exp_bounded(log_ratio)
    bounded = ratio.clamp(1 - bounds.low, 1 + bounds.high)
    objective = (ratio * advantage).minimum(bounded * advantage)
    clipped = ((advantage > 0) & (ratio > 1 + bounds.high)) | ((advantage < 0) & (ratio < 1 - bounds.low))
    if bounds.dual is not None:
        objective = objective.where(advantage >= 0, objective.maximum(bounds.dual * advantage))
        clipped = clipped | ((advantage < 0) & (ratio > bounds.dual))
    return objective, clipped


@_register
def cispo(log_ratio: Tensor, log_prob: Tensor, advantage: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """CISPO (MiniMax-M1, arXiv 2506.13585, eqs. 4 and 5): ``sg(clip(r, 1 - low, 1 + high)) A log pi``.

    A token with a clipped ratio keeps its gradient, weighted by the bound.
    """
    ratio = exp_bounded(log_ratio).detach()
    bounded = ratio.clamp(1 - bounds.low, 1 + bounds.high)
    return bounded * advantage * log_prob, bounded != ratio


@_register
def log_likelihood(
    log_ratio: Tensor, log_prob: Tensor, advantage: Tensor, bounds: Bounds
) -> tuple[Tensor, None]:
    """``A log pi`` without a ratio: REINFORCE, or a weighted likelihood if A is a weight."""
    return advantage * log_prob, None


@_register
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

    ``t`` is ``temperature_positive`` if A > 0, else ``temperature_negative``. The gate's slope is 1 at r = 1
    and decreases on both sides. Nothing is clipped.
    """
    # Keep the dtype of the advantages: a bool times a number would not.
    positive = (advantage > 0).to(advantage.dtype)
    temperature = positive * temperature_positive + (1 - positive) * temperature_negative
    gate = 4 / temperature * (temperature * (exp_bounded(log_ratio) - 1)).sigmoid()
    return gate * advantage, None
