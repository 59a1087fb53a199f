"""Log-ratios of two policies per token or per response, and the weights that correct an engine's mismatch."""

from __future__ import annotations

from torch import Tensor

from torchrl_grpo.objectives.surrogates import exp_bounded


def at_level(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """Per-token log-ratios ``[P, G, T]`` at the level at which they are used.

    ``token``: as they are. ``sequence``: their mean over the response, the log of the geometric mean of its
    ratios (GSPO, arXiv 2507.18071, eq. 7), at each of its tokens. ``trajectory``: their sum, the response as
    one action (RLOO, arXiv 2402.14740, sec. 2.2), likewise.

    Args:
        log_ratio: ``[P, G, T]``.
        mask: ``[P, G, T]`` bool, the tokens of the mean or sum.
        level: ``token``, ``sequence`` or ``trajectory``.

    Raises:
        ValueError: another name.
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
    log_gap: Tensor, mask: Tensor, *, kind: str, level: str, cap: float, floor: float
) -> Tensor:
    """Weights that correct for responses sampled by an engine that is not quite the trainer's model.

    With ``w = exp(log_gap)``: ``truncate`` is ``min(w, cap)`` (truncated importance sampling); ``mask`` is
    ``w`` where ``floor <= w <= cap`` and 0 elsewhere (IcePop's band; with floor 0, decoupled PPO as AReaL,
    arXiv 2505.24298, runs it). A token of weight 0 leaves the numerator of the loss; denominators count it.

    Args:
        log_gap: ``[P, G, T]``, the trainer's log-probability minus the engine's, of the same weights.
        mask: ``[P, G, T]`` bool.
        kind: ``truncate`` or ``mask``.
        level: see :func:`at_level`.
        cap: largest weight.
        floor: smallest weight kept, for ``mask``.

    Returns:
        ``[P, G, T]``, without gradient.

    Raises:
        ValueError: another kind.
    """
    weights = exp_bounded(at_level(log_gap, mask, level)).detach()
    if kind == "truncate":
        return weights.clamp(max=cap)
    if kind == "mask":
        return weights.masked_fill((weights < floor) | (weights > cap), 0.0)
    raise ValueError(f"correction {kind!r} is none of truncate, mask")
