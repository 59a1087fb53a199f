"""Group-relative advantages, computed once when a round enters the replay buffer.

Everything is computed in float64. In float32 a penalty would be rounded to the digits of a large reward
before the mean of the group is subtracted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs.transforms import Transform

from torchrl_grpo.batch.schema import sampled_counts, sampled_mask, set_rows
from torchrl_grpo.config.schema import PolicyConfig
from torchrl_grpo.objectives.coefficients import KLCoefficient
from torchrl_grpo.objectives.kl import kl_estimate
from torchrl_grpo.objectives.maxent import listwise_weights

# Tolerance for the difference of two rewards, in units of the machine epsilon. A weighted sum that is shifted
# and scaled is rounded four times, each time by at most half an epsilon, and two such errors add up.
_ROUNDING = 4.0
# Models and functions that give rewards compute in float32 at least.
_EPSILON = torch.finfo(torch.float32).eps


def shape_rewards(rewards: Tensor, shift: float, scale: float, clip: float | None) -> Tensor:
    """Return ``clip((r + shift) scale, -clip, clip)`` for rewards of any shape; no clipping if it is None."""
    shaped = (rewards + shift) * scale
    return shaped if clip is None else shaped.clamp(-clip, clip)


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """DAPO's soft penalty for long responses (arXiv 2503.14476, eq. 13), between -1 and 0.

    It is 0 up to ``max_length - buffer`` tokens, and falls linearly to -1 at ``max_length``.

    Args:
        lengths: lengths of the responses in tokens, any shape.
        max_length: maximum length of a response in tokens.
        buffer: number of tokens before the maximum over which the penalty grows.

    Returns:
        Penalties of the shape of ``lengths``.
    """
    return ((max_length - buffer - lengths) / buffer).clamp(-1.0, 0.0)


def group_advantage(
    rewards: Tensor, std_mode: str, eps: float, leave_one_out: bool = False, rounding: Tensor | None = None
) -> Tensor:
    """``A_i = (r_i - b_i) / (s + eps)`` within each group (GRPO, arXiv 2402.03300, sec. 4.1.2).

    ``b_i`` is the group's mean, or, with ``leave_one_out``, the mean of the others (RLOO, 2402.14740,
    sec. 2.2).

    Args:
        rewards: ``[P, G]``, one group per row.
        std_mode: choice of ``s``. ``population`` and ``unbiased`` are the group's standard deviation, divided
            by G or G - 1; ``batch`` is the unbiased standard deviation of all given rewards; ``none`` does
            not divide (Dr. GRPO, 2503.20783, sec. 3.2).
        eps: number added to the standard deviation.
        leave_one_out: whether the baseline is the mean of the other rewards.
        rounding: see :func:`is_constant`.

    Returns:
        Advantages ``[P, G]``, in the format of ``rewards``. They are exactly zero for a group of equal
        rewards, see :func:`is_constant`.

    Raises:
        ValueError: ``std_mode`` is unknown.
    """
    samples, values = rewards.shape[-1], rewards.double()
    centered = values - values.mean(-1, keepdim=True)
    if leave_one_out:
        centered = centered * samples / (samples - 1)
    if std_mode == "batch":
        centered = centered / (values.std() + eps)
    elif std_mode in ("population", "unbiased"):
        centered = centered / (values.std(-1, keepdim=True, correction=int(std_mode == "unbiased")) + eps)
    elif std_mode != "none":
        raise ValueError(f"advantage std {std_mode!r} must be population, unbiased, batch or none")
    # Equal floats can differ from their mean in the last bit, and a tiny std would magnify that difference.
    return centered.masked_fill(is_constant(rewards, rounding)[:, None], 0.0).to(rewards.dtype)


def decoupled_advantage(
    rewards: Tensor,
    weights: Sequence[float],
    std_mode: str,
    eps: float,
    leave_one_out: bool,
    roundings: Tensor | None = None,
) -> Tensor:
    """Normalize each reward within its group, and divide their weighted sum by its spread over the round.

    This is GDPO (arXiv 2601.05242, eqs. 4 to 6). A reward with a large spread does not hide the others.

    Args:
        rewards: ``[P, G, K]``.
        weights: weights of the K rewards.
        std_mode: see :func:`group_advantage`.
        eps: see :func:`group_advantage`.
        leave_one_out: see :func:`group_advantage`.
        roundings: ``[P, K]``, for each reward the ``rounding`` of :func:`is_constant`.

    Returns:
        Advantages ``[P, G]``, in the format of ``rewards``. They are zero if all sums of the round are
        equal. A sum no larger than its rounding error counts as zero.
    """
    total = torch.zeros_like(rewards[..., 0], dtype=torch.double)
    magnitude = torch.zeros_like(total)
    roundings = rounding_error(rewards.mT) if roundings is None else roundings
    for number, weight in enumerate(weights):
        arguments = rewards[..., number], std_mode, eps, leave_one_out, roundings[:, number]
        term = weight * group_advantage(*arguments).double()
        total += term
        magnitude += term.abs()
    # Rewards that cancel out leave a rounding error, which an equally small standard deviation would magnify.
    total = total.masked_fill(total.abs() <= _ROUNDING * _EPSILON * magnitude, 0.0)
    # The groups' means are zero already. Centering over the batch would only add rounding errors.
    return (total / (total.std() + eps) if total.any() else total).to(rewards.dtype)


def rounding_error(rewards: Tensor, epsilon: float | None = None) -> Tensor:
    """Return how far apart equal rewards of a group may be, because each was rounded.

    Args:
        rewards: ``[..., G]``.
        epsilon: machine epsilon of the format in which they were computed; None is that of ``rewards``.

    Returns:
        ``[...]``, relative to the group's largest absolute reward.
    """
    epsilon = torch.finfo(rewards.dtype).eps if epsilon is None else epsilon
    return _ROUNDING * epsilon * rewards.abs().amax(-1)


def is_constant(rewards: Tensor, rounding: Tensor | None = None) -> Tensor:
    """Find groups whose rewards are equal up to rounding.

    For example, 0.1 + 0.2 and 0.3 are the same reward.

    Args:
        rewards: ``[P, G]``.
        rounding: ``[P]``, largest difference of equal rewards; None is :func:`rounding_error`.

    Returns:
        ``[P]`` bool, True for groups of equal rewards.
    """
    spread = rewards.amax(-1) - rewards.amin(-1)
    rounding = rounding_error(rewards) if rounding is None else rounding
    return (spread.isfinite() & (spread <= rounding)) | (rewards == rewards[:, :1]).all(-1)


class GroupAdvantage(Transform):
    """Replay-buffer transform that writes ``"advantage"`` and the loss mask of a round.

    It reads ``("next", "reward")`` ``[P, G, 1]``, ``("next", "reward_parts")`` ``[P, G, K]``,
    ``"truncated"`` ``[P, G, 1]`` and ``("masks", "response")`` ``[P, G, T]``. It also reads log-probabilities
    if the KL is in the reward or in MaxEnt's weights. It writes ``"advantage"`` ``[P, G, 1]`` and
    ``("masks", "loss")`` ``[P, G, T]``. The loss mask has the sampled tokens, without the responses that
    ``policy.overlong=mask`` and ``policy.constant_groups`` exclude. TorchRL's ``MCAdvantage`` queues single
    answers until a group is complete. Here groups arrive complete.

    Args:
        cfg: configuration of the objective.
        kl: coefficient of the KL divergence to the reference.
        reward_weights: weights of the K rewards in ``reward_parts``.
        max_new_tokens: maximum length of a response in tokens.
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
        """Return the batch unchanged: the transform acts on writing only."""
        return tensordict

    def no_signal_mask(self, tensordict: TensorDictBase) -> Tensor:
        """Return ``[P]`` bool, True for groups whose responses all have the same reward, before any penalty.

        With ``policy.reward_combination=apart``, each reward with a weight other than 0 must be equal. With
        ``policy.advantage_estimator=reward`` there is no baseline, so the rewards must be 0. With a teacher,
        every group has a signal.
        """
        if self.cfg.distill_coef != 0:
            return torch.zeros(len(tensordict), dtype=torch.bool)
        if self.cfg.advantage_estimator == "reward":
            return self._nonzero(tensordict["next", "reward"].squeeze(-1)).eq(0).all(1)
        if self.cfg.reward_combination == "together":
            return self._is_constant(tensordict["next", "reward"].squeeze(-1))
        parts = tensordict["next", "reward_parts"].unbind(-1)
        weighted_parts = [
            part for part, weight in zip(parts, self.reward_weights, strict=True) if weight != 0
        ]
        return torch.stack([self._is_constant(part) for part in weighted_parts]).all(0)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        cfg = self.cfg
        penalty = self._overlong(tensordict)
        if cfg.kl_in == "reward" and self.kl.in_use:
            penalty = penalty - self.kl.value * self._divergence(tensordict)
        if cfg.reward_combination == "apart":
            advantage = self._decoupled(tensordict, penalty)
        else:
            advantage = self._from_sum(tensordict, penalty)
        learned = torch.ones((*advantage.shape, 1), dtype=torch.bool, device=advantage.device)
        if cfg.overlong == "mask":
            learned = learned & ~tensordict["truncated"]
        if cfg.constant_groups != "keep":
            learned = learned & ~self.no_signal_mask(tensordict)[:, None, None]
        groups = tensordict.unbind(0)
        masks = [sampled_mask(group) & own for group, own in zip(groups, learned, strict=True)]
        dtype = groups[0]["log_probs", "response"].dtype
        return set_rows(tensordict, ("masks", "loss"), masks).set(
            "advantage", advantage.to(dtype).unsqueeze(-1)
        )

    def _shape_rewards(self, rewards: Tensor) -> Tensor:
        cfg = self.cfg
        return shape_rewards(rewards.double(), cfg.reward_shift, cfg.reward_scale, cfg.reward_clip)

    def _rounding(self, rewards: Tensor) -> Tensor:
        """Return the rounding error ``[P]`` of shaped rewards ``[P, G]``; shaping adds none."""
        return rounding_error(rewards.double(), _EPSILON) * abs(self.cfg.reward_scale)

    def _nonzero(self, rewards: Tensor) -> Tensor:
        """Return shaped rewards. What only rounding leaves of a reward that the shift cancels is 0."""
        shaped, cfg = self._shape_rewards(rewards), self.cfg
        magnitude = rewards.double().abs().clamp(min=abs(cfg.reward_shift)) * abs(cfg.reward_scale)
        return shaped.masked_fill(shaped.abs() <= _ROUNDING * _EPSILON * magnitude, 0.0)

    def _is_constant(self, rewards: Tensor) -> Tensor:
        return is_constant(self._shape_rewards(rewards), self._rounding(rewards))

    def _penalized(self, rewards: Tensor, penalty: Tensor) -> tuple[Tensor, Tensor]:
        """Return shaped rewards ``[P, G]`` with their penalty, and their rounding error ``[P]``."""
        shaped, equal = self._shape_rewards(rewards), self._is_constant(rewards)
        # Rewards that differ by rounding only are the same, so penalties alone distinguish the responses.
        shaped = torch.where(equal[:, None], shaped[:, :1], shaped)
        rounding = self._rounding(rewards).masked_fill(equal, 0.0)
        return shaped + penalty, rounding + rounding_error(penalty, _EPSILON)

    def _overlong(self, tensordict: TensorDictBase) -> Tensor:
        lengths = torch.stack([group["masks", "response"].sum(-1) for group in tensordict.unbind(0)]).double()
        if self.cfg.overlong != "penalise":
            return torch.zeros_like(lengths)
        # DAPO's own ratio: 4,096 of 20,480 tokens.
        fifth = max(1, self.max_new_tokens // 5)
        buffer = fifth if self.cfg.overlong_buffer is None else self.cfg.overlong_buffer
        return overlong_penalty(lengths, self.max_new_tokens, buffer)

    def _divergence(self, tensordict: TensorDictBase) -> Tensor:
        """Return the KL to the reference, summed over each response: ``[P, G]``, nats."""
        sums = []
        for group in tensordict.unbind(0):
            policy, reference = (group["log_probs", name].double() for name in ("response", "reference"))
            per_token = kl_estimate(policy, reference, self.cfg.kl_estimator)
            sums.append(per_token.masked_fill(~sampled_mask(group), 0.0).sum(-1))
        return torch.stack(sums)

    def _from_sum(self, tensordict: TensorDictBase, penalty: Tensor) -> Tensor:
        cfg = self.cfg
        if cfg.advantage_estimator == "none":
            return torch.zeros_like(penalty)
        rewards, rounding = self._penalized(tensordict["next", "reward"].squeeze(-1), penalty)
        if cfg.advantage_estimator == "maxent":
            return self._maxent(tensordict, rewards)
        if cfg.advantage_estimator == "reward":
            return self._nonzero(tensordict["next", "reward"].squeeze(-1)) + penalty
        leave_one_out = cfg.advantage_estimator == "leave_one_out"
        return group_advantage(rewards, cfg.advantage_std, cfg.advantage_eps, leave_one_out, rounding)

    def _decoupled(self, tensordict: TensorDictBase, penalty: Tensor) -> Tensor:
        cfg = self.cfg
        none = torch.zeros_like(penalty)
        parts = [self._penalized(part, none) for part in tensordict["next", "reward_parts"].unbind(-1)]
        # Penalties are a separate reward of weight 1.
        rewards, roundings = zip(*parts, (penalty, rounding_error(penalty, _EPSILON)), strict=True)
        return decoupled_advantage(
            torch.stack(rewards, -1),
            (*self.reward_weights, 1.0),
            cfg.advantage_std,
            cfg.advantage_eps,
            cfg.advantage_estimator == "leave_one_out",
            torch.stack(roundings, -1),
        )

    def _maxent(self, tensordict: TensorDictBase, rewards: Tensor) -> Tensor:
        cfg = self.cfg
        ref_log_probs = torch.zeros_like(rewards)
        if self.kl.in_use:
            ref_log_probs = torch.stack(
                [
                    group["log_probs", "reference"].double().masked_fill(~sampled_mask(group), 0.0).sum(-1)
                    for group in tensordict.unbind(0)
                ]
            )
            if cfg.length_normalize_ref:
                ref_log_probs = ref_log_probs / sampled_counts(tensordict).clamp(min=1)
        weights = listwise_weights(
            rewards,
            ref_log_probs,
            tau=cfg.tau,
            beta=self.kl.value,
            q_temperature=cfg.q_temperature,
            q_epsilon=cfg.q_epsilon,
        )
        samples = rewards.shape[-1]
        # With log_likelihood the advantage is a response's weight times G. The mean over P x G responses is
        # then the mean over prompts of the weighted sum of log-likelihoods.
        return samples * weights if cfg.surrogate == "log_likelihood" else weights - 1 / samples
