"""From ``policy.*`` to the loss and the advantage."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from batches import make_batch, make_model, make_objective

from torchrl_grpo.config.values import SURROGATE_OPTIONS
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.objectives.surrogates import SURROGATES


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_the_kl_penalty_is_in_one_place_and_not_in_both(where: str) -> None:
    actor = TokenScorer(make_model())
    loss, advantage = make_objective(actor, kl_coef=0.3, kl_in=where)
    plain_loss, plain_advantage = make_objective(actor)
    assert loss.actor_network is actor
    batch = make_batch()
    terms, plain_terms = loss(batch), plain_loss(batch)
    written, plain = (transform.inv(batch.clone())["advantage"] for transform in (advantage, plain_advantage))
    assert ("loss_kl" in terms) == (where == "loss")
    assert bool((written != plain).any()) == (where == "reward")
    # Measured in either case.
    assert float(terms["kl_ref"]) > 0 and "kl_ref" not in plain_terms


@pytest.mark.parametrize("high,expected", [(None, 0.1), (0.28, 0.28), (0.0, 0.0)])
def test_the_upper_bound_is_the_lower_one_unless_it_is_given(high: float | None, expected: float) -> None:
    loss, _ = make_objective(TokenScorer(make_model()), clip_epsilon=0.1, clip_epsilon_high=high)
    assert (loss.bounds.low, loss.bounds.high) == (0.1, expected)


@pytest.mark.parametrize("keys", [{"entropy_coef": 0.1}, {"entropy_target": 1.0}, {}])
def test_gradients_of_the_entropy_are_kept_only_where_a_bonus_needs_them(keys: dict[str, Any]) -> None:
    actor = TokenScorer(make_model())
    make_objective(actor, **keys)
    assert actor.entropy_gradient == bool(keys)


def test_the_configuration_knows_each_surrogate_and_its_options() -> None:
    options = {
        name: {
            p.name: p.default
            for p in inspect.signature(function).parameters.values()
            if p.kind is p.KEYWORD_ONLY
        }
        for name, function in SURROGATES.items()
    }
    assert options == SURROGATE_OPTIONS
