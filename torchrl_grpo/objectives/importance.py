"""Log-ratios per token or per response, and importance weights for tokens that another policy sampled."""

from __future__ import annotations

from torch import Tensor

from torchrl_grpo.objectives.surrogates import exp_bounded


def aggregate_log_ratio(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """Aggregate per-token log-ratios to the level of the objective.

    ``token`` returns them unchanged. ``sequence`` puts their mean over the response at each of its tokens,
    which is the log of the geometric mean of the ratios (GSPO, arXiv 2507.18071, eq. 7). ``trajectory`` puts
    their sum over the response at each of its tokens, so that the response is one action (RLOO, arXiv
    2402.14740, sec. 2.2).

    Args:
        log_ratio: ``[P, G, T]``.
        mask: ``[P, G, T]`` bool, True for tokens that the mean or sum includes.
        level: ``token``, ``sequence`` or ``trajectory``.

    Returns:
        Log-ratios ``[P, G, T]``.

    Raises:
        ValueError: ``level`` is unknown.
    """
    if level == "token":
        return log_ratio
    total = log_ratio.masked_fill(~mask, 0.0).sum(-1, keepdim=True)
    if level == "sequence":
        return (total / mask.sum(-1, keepdim=True).clamp(min=1)).expand_as(log_ratio)
    if level == "trajectory":
        return total.expand_as(log_ratio)
    raise ValueError(f"ratio level {level!r} is none of token, sequence, trajectory")


def correction_weights(
    log_ratio: Tensor, mask: Tensor, *, kind: str, level: str, cap: float, floor: float
) -> Tensor:
    """Importance weights that correct from the distribution that sampled to the proximal policy.

    The two differ by the numerical mismatch between engine and trainer. In an asynchronous run they also
    differ by staleness.

    Let ``w = exp(log_ratio)``. With ``kind="truncate"`` the weight is ``min(w, cap)`` (truncated importance
    sampling). With ``kind="mask"`` it is ``w`` if ``floor <= w <= cap`` and 0 otherwise (the band of IcePop;
    with floor 0, decoupled PPO as in AReaL, arXiv 2505.24298). A token of weight 0 is excluded from the
    numerator of the loss, but not from its denominator.

    Args:
        log_ratio: ``[P, G, T]``, log-probability under the proximal policy minus that of the engine when it
            sampled.
        mask: ``[P, G, T]`` bool, True for tokens that the loss counts.
        kind: ``truncate`` or ``mask``.
        level: see :func:`aggregate_log_ratio`.
        cap: largest weight.
        floor: smallest weight that ``kind="mask"`` keeps.

    Returns:
        Weights ``[P, G, T]``, without gradient.

    Raises:
        ValueError: ``kind`` is unknown.
    """
    weights = exp_bounded(aggregate_log_ratio(log_ratio, mask, level)).detach()
    if kind == "truncate":
        return weights.clamp(max=cap)
    if kind == "mask":
        return weights.masked_fill((weights < floor) | (weights > cap), 0.0)
    raise ValueError(f"correction {kind!r} is none of truncate, mask")
