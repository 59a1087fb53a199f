"""Group-relative advantages, computed once on the way into the replay buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs.transforms import Transform

from torchrl_grpo.config.schema import PolicyConfig
from torchrl_grpo.objectives.coefficients import KLCoefficient
from torchrl_grpo.objectives.kl import kl_estimate
from torchrl_grpo.objectives.maxent import listwise_weights

# A weighted sum that is shifted and scaled is rounded four times, to half a unit in the last place each.
_ROUNDING = 4.0


def shape_rewards(rewards: Tensor, shift: float, scale: float, clip: float | None) -> Tensor:
    """``clip((r + shift) scale, -clip, clip)``, of any shape."""
    shaped = (rewards + shift) * scale
    return shaped if clip is None else shaped.clamp(-clip, clip)


def overlong_penalty(lengths: Tensor, longest: int, buffer: int) -> Tensor:
    """DAPO's soft penalty for long responses (arXiv 2503.14476, eq. 13), between -1 and 0.

    0 up to ``longest - buffer`` tokens, then falling linearly to -1 at ``longest``.

    Args:
        lengths: tokens of each response, any shape.
        longest: the length bound of a response.
        buffer: tokens before the bound over which the penalty grows.
    """
    return ((longest - buffer - lengths) / buffer).clamp(-1.0, 0.0)


def group_advantage(
    rewards: Tensor, std: str, eps: float, leave_one_out: bool = False, offset: float = 0.0
) -> Tensor:
    """``A_i = (r_i - b_i) / (s + eps)`` within each group (GRPO, arXiv 2402.03300, sec. 4.1.2).

    ``b_i`` is the group's mean, or, with ``leave_one_out``, the mean of the others (RLOO, 2402.14740,
    sec. 2.2).

    Args:
        rewards: ``[P, G]``, one group a row.
        std: ``s`` is the group's standard deviation, ``population`` (divides by G) or ``unbiased`` (by
            G - 1); or ``batch``, the unbiased one of all rewards given; or ``none``, no division (Dr. GRPO,
            2503.20783, sec. 3.2).
        eps: added to the standard deviation.
        leave_one_out: which baseline.
        offset: see :func:`is_constant`.

    Returns:
        ``[P, G]``. A group of equal rewards gets exactly zero, see :func:`is_constant`.

    Raises:
        ValueError: another name for ``std``.
    """
    samples = rewards.shape[-1]
    centered = rewards - rewards.mean(-1, keepdim=True)
    if leave_one_out:
        centered = centered * samples / (samples - 1)
    if std == "batch":
        centered = centered / (rewards.std() + eps)
    elif std in ("population", "unbiased"):
        centered = centered / (rewards.std(-1, keepdim=True, correction=int(std == "unbiased")) + eps)
    elif std != "none":
        raise ValueError(f"advantage std {std!r} is none of population, unbiased, batch, none")
    # Equal floats can differ from their mean in the last bit, and a tiny std would blow that up.
    return centered.masked_fill(is_constant(rewards, offset)[:, None], 0.0)


def decoupled_advantage(
    rewards: Tensor, weights: Sequence[float], std: str, eps: float, leave_one_out: bool, offset: float = 0.0
) -> Tensor:
    """Each reward normalized within its group, their weighted sum normalized over the batch.

    GDPO (arXiv 2601.05242, eqs. 4 to 6): no reward is drowned by one of a larger spread.

    Args:
        rewards: ``[P, G, K]``.
        weights: K of them.
        std: see :func:`group_advantage`.
        eps: likewise.
        leave_one_out: likewise.
        offset: likewise, of each reward.

    Returns:
        ``[P, G]``. A batch whose sums are all equal gets zero, and so does a sum that is rounding only.
    """
    total = torch.zeros_like(rewards[..., 0])
    size = torch.zeros_like(total)
    for reward, weight in zip(rewards.unbind(-1), weights, strict=True):
        share = weight * group_advantage(reward, std, eps, leave_one_out, offset)
        total += share
        size += share.abs()
    # What rewards that cancel leave behind would be blown up by a standard deviation as small.
    total = total.masked_fill(total.abs() <= _ROUNDING * torch.finfo(total.dtype).eps * size, 0.0)
    # The groups' means are zero already; centring over the batch would only add rounding.
    return total / (total.std() + eps) if total.any() else total


def is_constant(rewards: Tensor, offset: float = 0.0) -> Tensor:
    """``[P]`` bool: groups ``[P, G]`` whose rewards are all the same, or differ by no more than rounding.

    0.1 + 0.2 and 0.3 are the same reward. Their difference is compared with the largest of the group.

    Args:
        rewards: ``[P, G]``.
        offset: number that is part of each. Where it cancels the rest, only that one's rounding is left.
    """
    spread = rewards.amax(-1) - rewards.amin(-1)
    rounding = _ROUNDING * torch.finfo(rewards.dtype).eps * (rewards.abs().amax(-1) + abs(offset))
    return (spread.isfinite() & (spread <= rounding)) | (rewards == rewards[:, :1]).all(-1)


class GroupAdvantage(Transform):
    """Write-side transform: rewards to ``"advantage"`` ``[P, G, 1]`` and ``("masks", "loss")`` ``[P, G, T]``.

    Reads ``("next", "reward")`` ``[P, G, 1]``, ``("next", "reward_parts")`` ``[P, G, K]``, ``"truncated"``,
    ``("masks", "response")`` and, with a KL in the reward or in MaxEnt's weights, the log-probabilities. The
    loss mask is the response mask without what ``policy.overlong=mask`` and ``policy.constant_groups`` leave
    out. TorchRL's ``MCAdvantage`` queues single answers until a group is complete; groups arrive whole here.

    Args:
        cfg: the ingredients.
        kl: weight of the KL divergence to the reference.
        reward_weights: K weights of the rewards in ``reward_parts``.
        max_new_tokens: length bound of a response.
    """

    def __init__(
        self, cfg: PolicyConfig, kl: KLCoefficient, reward_weights: Sequence[float], max_new_tokens: int
    ) -> None:
        super().__init__()
        self.cfg = cfg
        self.kl = kl
        self.reward_weights = (*reward_weights,)
        self.max_new_tokens = max_new_tokens

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Reading changes nothing."""
        return tensordict

    def without_signal(self, tensordict: TensorDictBase) -> Tensor:
        """``[P]`` bool: groups in which every response earned the same, before any penalty.

        With ``policy.reward_combination=apart``, the same of every reward that counts.
        """
        if self.cfg.reward_combination == "together":
            return is_constant(self._shape(tensordict["next", "reward"].squeeze(-1)), self._offset)
        parts = self._shape(tensordict["next", "reward_parts"]).unbind(-1)
        counting = [part for part, weight in zip(parts, self.reward_weights, strict=True) if weight != 0]
        return torch.stack([is_constant(part, self._offset) for part in counting]).all(0)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        cfg, mask = self.cfg, tensordict["masks", "response"]
        added = self._overlong(tensordict)
        if cfg.kl_in == "reward" and self.kl.in_use:
            added = added - self.kl.value * self._divergence(tensordict)
        if cfg.reward_combination == "apart":
            advantage = self._apart(tensordict, added)
        else:
            rewards = self._shape(tensordict["next", "reward"].squeeze(-1)) + added
            advantage = self._together(tensordict, rewards)
        kept = mask
        if cfg.overlong == "mask":
            kept = kept & ~tensordict["truncated"]
        if cfg.constant_groups != "keep":
            kept = kept & ~self.without_signal(tensordict)[:, None, None]
        tensordict.set(("masks", "loss"), kept)
        return tensordict.set("advantage", advantage.unsqueeze(-1))

    def _shape(self, rewards: Tensor) -> Tensor:
        return shape_rewards(rewards, self.cfg.reward_shift, self.cfg.reward_scale, self.cfg.reward_clip)

    @property
    def _offset(self) -> float:
        """What :meth:`_shape` adds."""
        return self.cfg.reward_shift * self.cfg.reward_scale

    def _overlong(self, tensordict: TensorDictBase) -> Tensor:
        lengths = tensordict["masks", "response"].sum(-1).to(tensordict["next", "reward"].dtype)
        if self.cfg.overlong != "penalise":
            return torch.zeros_like(lengths)
        # DAPO's own share: 4,096 of 20,480 tokens.
        fifth = max(1, self.max_new_tokens // 5)
        buffer = fifth if self.cfg.overlong_buffer is None else self.cfg.overlong_buffer
        return overlong_penalty(lengths, self.max_new_tokens, buffer)

    def _divergence(self, tensordict: TensorDictBase) -> Tensor:
        """KL to the reference summed over each response, ``[P, G]`` nats."""
        per_token = kl_estimate(
            tensordict["log_probs", "response"], tensordict["log_probs", "reference"], self.cfg.kl_estimator
        )
        return per_token.masked_fill(~tensordict["masks", "response"], 0.0).sum(-1)

    def _together(self, tensordict: TensorDictBase, rewards: Tensor) -> Tensor:
        cfg = self.cfg
        if cfg.advantage_estimator == "maxent":
            return self._maxent(tensordict, rewards)
        leave_one_out = cfg.advantage_estimator == "leave_one_out"
        return group_advantage(rewards, cfg.advantage_std, cfg.advantage_eps, leave_one_out, self._offset)

    def _apart(self, tensordict: TensorDictBase, added: Tensor) -> Tensor:
        cfg = self.cfg
        # Penalties are a reward of their own, of weight 1.
        rewards = torch.cat([self._shape(tensordict["next", "reward_parts"]), added.unsqueeze(-1)], -1)
        weights = (*self.reward_weights, 1.0)
        leave_one_out = cfg.advantage_estimator == "leave_one_out"
        return decoupled_advantage(
            rewards, weights, cfg.advantage_std, cfg.advantage_eps, leave_one_out, self._offset
        )

    def _maxent(self, tensordict: TensorDictBase, rewards: Tensor) -> Tensor:
        cfg, mask = self.cfg, tensordict["masks", "response"]
        ref_log_probs = torch.zeros(rewards.shape)
        if self.kl.in_use:
            ref_log_probs = tensordict["log_probs", "reference"].masked_fill(~mask, 0.0).sum(-1)
            if cfg.length_normalize_ref:
                ref_log_probs = ref_log_probs / mask.sum(-1).clamp(min=1)
        weights = listwise_weights(
            rewards,
            ref_log_probs,
            tau=cfg.tau,
            beta=self.kl.value,
            q_temperature=cfg.q_temperature,
            q_epsilon=cfg.q_epsilon,
        )
        samples = rewards.shape[-1]
        # The likelihood is weighted by w itself; the factor makes the batch's mean over responses the mean
        # over prompts of their weighted sums.
        return samples * weights if cfg.surrogate == "log_likelihood" else weights - 1 / samples
