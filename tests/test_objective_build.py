"""From ``policy.*`` to the loss and the advantage."""

from __future__ import annotations

import pytest
from batches import make_model

from torchrl_grpo.config import PolicyConfig
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.models.logprobs import TokenScorer
from torchrl_grpo.objectives.build import build_objective


@pytest.mark.parametrize("where,in_loss,in_reward", [("loss", 0.3, 0.0), ("reward", 0.0, 0.3)])
def test_the_kl_penalty_is_in_one_place_and_not_in_both(where: str, in_loss: float, in_reward: float) -> None:
    actor = TokenScorer(make_model())
    cfg = PolicyConfig(kl_coef=0.3, kl_in=where, kl_estimator="k2", advantage_std="none", advantage_eps=0.5)
    loss, advantage = build_objective(cfg, actor)
    assert loss.actor_network is actor
    assert (loss.kl_coef, advantage.kl_coef) == (in_loss, in_reward)
    assert loss.kl_estimator == advantage.kl_estimator == "k2"
    assert (advantage.std, advantage.eps) == ("none", 0.5)


@pytest.mark.parametrize("high,expected", [(None, 0.1), (0.28, 0.28), (0.0, 0.0)])
def test_the_upper_bound_is_the_lower_one_unless_it_is_given(high: float | None, expected: float) -> None:
    cfg = PolicyConfig(clip_epsilon=0.1, clip_epsilon_high=high)
    loss, _ = build_objective(cfg, TokenScorer(make_model()))
    assert (loss.clip_epsilon_low, loss.clip_epsilon_high) == (0.1, expected)


def test_an_unknown_objective_is_named() -> None:
    with pytest.raises(ConfigError, match=r"policy.name=ppo: .* write one of grpo"):
        build_objective(PolicyConfig(name="ppo"), TokenScorer(make_model()))
