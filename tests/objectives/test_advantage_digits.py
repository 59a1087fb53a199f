"""Large rewards take no digits from advantages: float32 results against lists of Python's floats."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from batches import FixedScorer, make_batch, make_objective
from objective_by_hand import advantages_by_hand
from tensordict import TensorDict

from torchrl_grpo.config.schema import PolicyConfig
from torchrl_grpo.objectives.advantage import group_advantage

# What a result in float32 may be off, as a share of it: its own rounding.
ROUNDED = 2 * torch.finfo(torch.float32).eps
LONGEST = 6
OFFSETS = (1e4, -3e5, 0.0)
SETTINGS: dict[str, dict[str, Any]] = {
    "unbiased": {},
    "population": {"advantage_std": "population", "advantage_eps": 0.0},
    "of the round": {"advantage_std": "batch"},
    "undivided": {"advantage_std": "none"},
    "leave one out": {"advantage_estimator": "leave_one_out", "advantage_std": "none"},
    "long": {"overlong": "penalise", "overlong_buffer": 4},
    "k1 in the reward": {"kl_coef": 0.01, "kl_estimator": "k1", "kl_in": "reward"},
    "k3 in the reward": {"kl_coef": 0.01, "kl_in": "reward", "advantage_std": "none"},
    "both": {"kl_coef": 0.01, "kl_in": "reward", "overlong": "penalise"},
    "shaped": {"reward_shift": -7.0, "reward_scale": 0.3, "overlong": "penalise"},
    "shifted far": {"reward_shift": 1e7, "overlong": "penalise"},
    "maxent": {"advantage_estimator": "maxent", "kl_coef": 0.04, "kl_in": "weights", "overlong": "penalise"},
}


def batch_with(offset: float, equal: bool = False) -> TensorDict:
    """Rewards near an offset, one row of which are the same."""
    batch = make_batch(P=3, G=4, T=LONGEST, seed=5)
    rewards = batch["next", "reward"].double() + offset
    rewards[0] = rewards[0, 0]
    if equal:
        rewards[:] = rewards[0, 0]
    batch["next", "reward"] = rewards
    return batch


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("name", SETTINGS)
def test_advantages_near_large_rewards(name: str, offset: float) -> None:
    keys = SETTINGS[name]
    for batch in (batch_with(offset), batch_with(offset, equal=True)):
        if offset:
            # A batch whose rewards someone keeps in float32 begins with the digits that it has.
            batch["next", "reward"] = batch["next", "reward"].float()
        by_hand = batch.clone()
        if name == "maxent":
            # It exponentiates rewards, and their differences alone count.
            by_hand["next", "reward"] = batch["next", "reward"].double() - offset
        expected = torch.tensor(advantages_by_hand(PolicyConfig(**keys), by_hand, LONGEST))
        _, advantage = make_objective(FixedScorer(batch["log_probs", "response"]), LONGEST, **keys)
        advantages = advantage.inv(batch)["advantage"].squeeze(-1)
        assert advantages.dtype == torch.float32
        # Weights of maxent are differences of numbers near 1 / G.
        torch.testing.assert_close(advantages.double(), expected.double(), rtol=ROUNDED, atol=1e-8)
        assert advantages.any() == expected.any()


def test_rewards_apart_near_large_rewards() -> None:
    batch = batch_with(0.0)
    parts = torch.stack([1e4 + torch.rand(3, 4), torch.rand(3, 4)], -1)
    batch["next", "reward_parts"] = parts
    keys: dict[str, Any] = {"reward_combination": "apart", "overlong": "penalise", "advantage_eps": 0.0}
    _, advantage = make_objective(FixedScorer(batch["log_probs", "response"]), LONGEST, (0.3, 2.0), **keys)
    advantages = advantage.inv(batch)["advantage"].squeeze(-1)
    lengths = batch["masks", "response"].sum(-1)
    penalty = (LONGEST - 1 - lengths.double()).clamp(-1.0, 0.0)
    sums = []
    for row, late in zip(parts.double().tolist(), penalty.tolist(), strict=True):
        terms = []
        for weight, values in zip((0.3, 2.0, 1.0), [*zip(*row, strict=True), late], strict=True):
            spread = statistics.stdev(values)
            terms.append(
                [weight * (v - statistics.fmean(values)) / spread if spread else 0.0 for v in values]
            )
        sums += [sum(column) for column in zip(*terms, strict=True)]
    expected = [total / statistics.stdev(sums) for total in sums]
    torch.testing.assert_close(
        advantages.flatten().double(), torch.tensor(expected).double(), rtol=ROUNDED, atol=1e-8
    )


@pytest.mark.parametrize("std", ["population", "unbiased", "batch", "none"])
def test_float32_rewards_give_float32_advantages_of_all_their_digits(std: str) -> None:
    rewards = 1e4 + torch.rand(5, 8, generator=torch.Generator().manual_seed(0))
    advantages, exact = group_advantage(rewards, std, 1e-4), group_advantage(rewards.double(), std, 1e-4)
    assert advantages.dtype == torch.float32
    torch.testing.assert_close(advantages.double(), exact, rtol=ROUNDED, atol=0.0)


def test_penalties_below_the_digits_of_the_reward_still_count() -> None:
    batch = batch_with(1e6, equal=True)
    lengths = batch["masks", "response"].sum(-1)
    assert lengths.unique().numel() > 1
    keys: dict[str, Any] = {"overlong": "penalise", "overlong_buffer": LONGEST, "advantage_std": "none"}
    _, advantage = make_objective(FixedScorer(batch["log_probs", "response"]), LONGEST, **keys)
    advantages = advantage.inv(batch)["advantage"].squeeze(-1)
    penalty = -lengths.double() / LONGEST
    expected = penalty - penalty.mean(-1, keepdim=True)
    torch.testing.assert_close(advantages.double(), expected, rtol=ROUNDED, atol=1e-8)


@pytest.mark.parametrize(
    ("rewards", "keys"),
    [
        ([0.1 + 0.2, 0.3, 0.3, 0.3], {"reward_shift": -0.3, "advantage_estimator": "reward"}),
        (torch.full((4,), 0.1).tolist(), {"reward_shift": -0.1, "advantage_estimator": "reward"}),
        ([0.1 + 0.2, 0.3, 0.3, 0.3], {"reward_scale": -1.0}),
    ],
)
def test_what_rounding_leaves_of_equal_rewards_is_no_signal(
    rewards: list[float], keys: dict[str, Any]
) -> None:
    batch = make_batch(P=2, G=4)
    batch["next", "reward"] = batch["next", "reward"].double()
    batch["next", "reward"][0, :, 0] = torch.tensor(rewards, dtype=torch.double)
    _, advantage = make_objective(FixedScorer(batch["log_probs", "response"]), **keys)
    assert advantage.no_signal_mask(batch).tolist() == [True, False]
    assert not advantage.inv(batch)["advantage"][0].any()
