"""MaxEnt GRPO: the listwise target distribution over the candidates of a prompt."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def listwise_weights(
    utilities: Tensor,
    ref_log_probs: Tensor,
    *,
    tau: float,
    beta: float,
    q_temperature: float,
    q_epsilon: float,
) -> Tensor:
    """The distribution over a group's candidates that maximizes a KL- and entropy-regularized objective.

    With ``p = softmax(u / q_temperature)`` and ``q = p (1 - K q_epsilon) + q_epsilon``,

        w = softmax_i[(log q_i + beta l_ref,i) / (tau + beta)]

    maximizes ``E_w[log q] - beta KL(w || ref) + tau H(w)`` over the simplex. As ``tau + beta`` goes to 0, it
    selects the best candidate. For large ``tau`` it is uniform. For ``beta`` far above ``tau`` it follows the
    reference.

    Args:
        utilities: ``[P, K]``, rewards of the candidates.
        ref_log_probs: ``[P, K]``, log-probability of each response under the reference.
        tau: weight of the entropy.
        beta: weight of the divergence from the reference; ``tau + beta`` must be above 0.
        q_temperature: temperature of the target distribution ``p``.
        q_epsilon: smallest probability of a candidate in ``q``, at most 1 / K.

    Returns:
        Probabilities ``[P, K]``; each row sums to 1.
    """
    candidates = utilities.shape[-1]
    log_p = torch.log_softmax(utilities / q_temperature, dim=-1)
    log_q = log_p
    if q_epsilon > 0:
        floor = torch.full_like(log_p, math.log(q_epsilon))
        left = 1 - candidates * q_epsilon
        log_q = torch.logaddexp(log_p + math.log(left), floor) if left > 0 else floor
    return torch.softmax((log_q + beta * ref_log_probs) / (tau + beta), dim=-1)
