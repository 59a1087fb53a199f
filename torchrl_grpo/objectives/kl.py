"""Estimators of KL(policy || reference) from one sample per token.

With ``d = log ref - log policy`` at a token drawn from the policy (Schulman, "Approximating KL
divergence", 2020; k3 is also GRPO's, arXiv 2402.03300, eq. 4):

    k1 = -d            high variance, may be negative
    k2 = d^2 / 2       low variance
    k3 = e^d - 1 - d   low variance, never negative

k1 and k3 are unbiased, which is said of their values. The gradient depends on where the estimate counts. Over
tokens of the policy, its expectation is

==========  ===========  ===============  ===================================
estimator   value        in the loss      in the reward
==========  ===========  ===============  ===================================
k1          KL(pi, ref)  0                that of KL(pi, ref)
k2          no KL        of KL(pi, ref)   of no KL
k3          KL(pi, ref)  of KL(ref, pi)   of KL(pi, ref) minus KL(ref, pi)
==========  ===========  ===============  ===================================

Gradients of the loss leave out that a token changes which texts follow. k1 in the reward counts that too, if
the ratio is that of a whole response.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_grpo.objectives.surrogates import MAX_LOG_RATIO

# In float32, what is left of 1 is known no better than this.
_LEAST_REST = 1e-6


def candidate_kl(log_probs: Tensor, teacher: Tensor) -> Tensor:
    """Compute KL(policy || teacher) per token over the teacher's candidates, and all other tokens as one.

    With the set S of candidates, ``p`` of the policy and ``q`` of the teacher, it is

        sum_{v in S} p_v (log p_v - log q_v) + (1 - p_S) (log (1 - p_S) - log (1 - q_S)),

    ``p_S`` and ``q_S`` being the sums over S. It is exact if S is the whole vocabulary, and never larger than
    the exact divergence.

    Args:
        log_probs: ``[P, G, K, T]``, log-probabilities of the candidates under the policy.
        teacher: ``[P, G, K, T]``, under the teacher.

    Returns:
        Divergences in nats, ``[P, G, T]``.
    """
    summed = (log_probs.exp() * (log_probs - teacher)).sum(2)
    rest, others = ((1 - values.exp().sum(2)).clamp(min=_LEAST_REST) for values in (log_probs, teacher))
    return summed + rest * (torch.log(rest) - torch.log(others))


def kl_estimate(log_probs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Estimate the KL divergence per token.

    Args:
        log_probs: log-probabilities of the sampled tokens under the policy, any shape.
        reference: log-probabilities of the same tokens under the reference, same shape.
        estimator: ``k1``, ``k2`` or ``k3``.

    Returns:
        Estimates in nats, of the shape of ``log_probs``.

    Raises:
        ValueError: ``estimator`` is unknown.
    """
    difference = reference - log_probs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        bounded = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        # Near 0, where the two policies agree, exp() - 1 would be mostly rounding error.
        return bounded.expm1() - bounded
    raise ValueError(f"KL estimator {estimator!r} is none of k1, k2, k3")
