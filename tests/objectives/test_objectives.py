"""Advantages, KL estimators and the clipped loss, against loops written from the papers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from batches import FixedScorer, gradients, inputs, make_batch, make_model, make_objective, split, widen
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_by_hand import k_by_hand
from rounding import EQUAL, EXACT
from tensordict import TensorDict
from torch import Tensor

from torchrl_grpo.config.schema import PolicyConfig
from torchrl_grpo.config.values import Proximal
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.objectives.advantage import decoupled_advantage, group_advantage, is_constant
from torchrl_grpo.objectives.aggregation import count_totals
from torchrl_grpo.objectives.kl import kl_estimate
from torchrl_grpo.objectives.loss import GroupPolicyLoss
from torchrl_grpo.objectives.surrogates import Bounds, clip

REWARDS = st.lists(st.lists(st.floats(-10, 10, width=32), min_size=4, max_size=4), min_size=1, max_size=5)


def loss_by_hand(
    new: Tensor, batch: TensorDict, low: float, high: float, kl_coef: float = 0.0, kind: str = "k3"
) -> tuple[Tensor, dict[str, float]]:
    """Token-level GRPO (DAPO, eq. 8, and the KL term of GRPO), one token after the other in float64."""
    mask, old = batch["masks", "response"], batch["log_probs", "response"].double()
    advantage = batch["advantage"].double()
    tokens = int(mask.sum())
    total = torch.zeros((), dtype=torch.float64)
    kl_total = torch.zeros((), dtype=torch.float64)
    sums = dict.fromkeys(("clip_fraction", "kl_approx", "ratio", "ratio_squared", "logprob_diff"), 0.0)
    P, G, T = mask.shape
    for p in range(P):
        for s in range(G):
            A = advantage[p, s, 0]
            for t in range(T):
                if not mask[p, s, t]:
                    continue
                r = torch.exp(new[p, s, t].double() - old[p, s, t])
                bounded = torch.clamp(r, 1 - low, 1 + high)
                total = total + torch.min(r * A, bounded * A)
                if kl_coef:
                    ref = batch["log_probs", "reference"][p, s, t].double()
                    kl_total = kl_total + k_by_hand(kind, new[p, s, t].double(), ref)
                value = float(r.detach())
                sums["clip_fraction"] += (A > 0 and value > 1 + high) or (A < 0 and value < 1 - low)
                sums["ratio"] += value
                sums["ratio_squared"] += value**2
                sums["kl_approx"] += value - 1 - math.log(value)
                sums["logprob_diff"] += abs(math.log(value))
    loss = -total / tokens + kl_coef * kl_total / tokens
    return loss, {name: float(value) / tokens for name, value in sums.items()}


def total_of(terms: TensorDict) -> Tensor:
    total: Tensor = terms["loss_objective"] + terms.get("loss_kl", 0.0)
    return total


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kl_coef,kind", [(0.0, "k3"), (0.3, "k1"), (0.3, "k2"), (0.05, "k3")])
@pytest.mark.parametrize("low,high", [(0.2, 0.2), (0.2, 0.28), (0.0, 0.0), (1.0, 5.0)])
def test_loss_and_its_gradient_by_token_equal_the_double_loop(
    low: float, high: float, kl_coef: float, kind: str
) -> None:
    batch = make_batch(seed=3)
    old = batch["log_probs", "response"]
    # Ratios from 0.5 to 2, so that both bounds bite with either sign of the advantage.
    new = old + 0.3 * torch.randn(old.shape, generator=torch.Generator().manual_seed(1))
    scorer = FixedScorer(new)
    loss, _ = make_objective(
        scorer, clip_epsilon=low, clip_epsilon_high=high, kl_coef=kl_coef, kl_estimator=kind
    )
    terms = loss(batch)
    total_of(terms).backward()
    leaf = new.double().clone().requires_grad_()
    expected, metrics = loss_by_hand(leaf, batch, low, high, kl_coef, kind)
    (gradient,) = torch.autograd.grad(expected, leaf)
    assert float(total_of(terms).detach()) == pytest.approx(float(expected.detach()), **EQUAL)
    torch.testing.assert_close(scorer.log_probs.grad, gradient, **EXACT)
    for name, value in metrics.items():
        assert float(terms[name]) == pytest.approx(value, **EQUAL), name
    assert float(terms["entropy"]) == pytest.approx(0.25)
    if low == 0.2:
        assert 0 < metrics["clip_fraction"] < 1, "the clip was not tested"


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kl_coef,kind", [(0.0, "k3"), (0.1, "k1"), (0.1, "k3")])
def test_parameter_gradients_of_a_model_equal_the_double_loop(kl_coef: float, kind: str) -> None:
    model, batch = make_model(), make_batch(P=3, G=3)
    scorer = TokenScorer(model)
    with torch.no_grad():
        sampled = scorer(*inputs(batch)).log_probs
    noise = 0.3 * torch.randn(sampled.shape, generator=torch.Generator().manual_seed(0))
    batch["log_probs", "response"] = (sampled + noise) * batch["masks", "response"]
    batch["log_probs", "reference"] = (sampled - noise) * batch["masks", "response"]
    options: dict[str, Any] = {"kl_coef": kl_coef, "kl_estimator": kind}
    loss, _ = make_objective(scorer, clip_epsilon_high=0.28, **options)
    model.zero_grad()
    total_of(loss(batch)).backward()
    grads = gradients(model)
    model.zero_grad()
    expected, _ = loss_by_hand(scorer(*inputs(batch)).log_probs, batch, 0.2, 0.28, kl_coef, kind)
    expected.backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(
            grads[name],
            gradient,
            **EXACT,
            msg=lambda m, n=name: f"{n}: {m}",  # type: ignore[misc]
        )


def make_loss(model: torch.nn.Module, shared: bool = True) -> GroupPolicyLoss:
    scorer = TokenScorer(model, temperature=0.9, shares_prefix=shared)
    return make_objective(scorer, clip_epsilon_high=0.28, kl_coef=0.05)[0]


def near(model: torch.nn.Module, batch: TensorDict) -> TensorDict:
    """The batch with log-probabilities a little off the model's own, as after a few updates."""
    mask = batch["masks", "response"]
    with torch.no_grad():
        own = TokenScorer(model, temperature=0.9)(*inputs(batch)).log_probs
    g = torch.Generator().manual_seed(5)
    for key in ("response", "reference"):
        batch["log_probs", key] = (own + 0.3 * torch.randn(own.shape, generator=g)) * mask
    return batch


def run_in_pieces(
    loss: GroupPolicyLoss, model: Any, batch: TensorDict, pieces: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    model.zero_grad()
    sums: dict[str, float] = {}
    totals = count_totals(batch["masks", "loss"])
    count = 0
    for piece in split(batch, len(batch), pieces):
        terms = loss(piece, totals=totals)
        total_of(terms).backward()
        for name, value in terms.items():
            sums[name] = sums.get(name, 0.0) + float(value.detach())
        count += 1
    assert count == pieces
    return sums, gradients(model)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("pieces", [2, 4, 8, 16])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "plain"])
def test_micro_batches_add_up_to_the_whole_batch(pieces: int, shared: bool) -> None:
    # 4 groups of 4: from 8 pieces on a group itself is cut.
    model = make_model()
    batch = near(model, make_batch(P=4, G=4, seed=11))
    loss = make_loss(model, shared)
    whole, expected = run_in_pieces(loss, model, batch, 1)
    sums, grads = run_in_pieces(loss, model, batch, pieces)
    assert whole.keys() == sums.keys() and {"kl_ref", "loss_kl", "clip_fraction"} <= whole.keys()
    for name, value in whole.items():
        assert sums[name] == pytest.approx(value, **EQUAL), name
    for name, gradient in expected.items():
        torch.testing.assert_close(grads[name], gradient, **EXACT, msg=name)
    assert max(float(g.abs().max()) for g in expected.values()) > 0.01, "nothing was compared"


@pytest.mark.usefixtures("float64")
def test_shared_prefix_and_plain_agree_in_loss_and_gradient() -> None:
    model = make_model()
    batch = near(model, make_batch(P=3, G=4))
    shared, grads = run_in_pieces(make_loss(model, True), model, batch, 1)
    plain, other = run_in_pieces(make_loss(model, False), model, batch, 1)
    for name in shared:
        assert shared[name] == pytest.approx(plain[name], **EQUAL), name
    for name in grads:
        torch.testing.assert_close(grads[name], other[name], **EXACT)


@pytest.mark.usefixtures("float64")
def test_the_amount_of_padding_changes_nothing() -> None:
    model = make_model()
    batch = near(model, make_batch(P=3, G=4))
    loss = make_loss(model)
    narrow, grads = run_in_pieces(loss, model, batch, 1)
    wide, other = run_in_pieces(loss, model, widen(batch, 6, 9), 1)
    for name in narrow:
        assert wide[name] == pytest.approx(narrow[name], **EQUAL), name
    for name in grads:
        torch.testing.assert_close(grads[name], other[name], **EXACT)


@pytest.mark.parametrize("junk", [1e30, math.inf, math.nan])
def test_padding_gets_no_gradient_whatever_stands_in_it(junk: float) -> None:
    batch = make_batch()
    mask = batch["masks", "response"]
    scorer = FixedScorer(batch["log_probs", "response"] + 0.1)
    for key in ("response", "reference"):
        batch["log_probs", key] = batch["log_probs", key].masked_fill(~mask, junk)
    loss, _ = make_objective(scorer, kl_coef=0.1)
    terms = loss(batch)
    total_of(terms).backward()
    assert all(math.isfinite(float(value.detach())) for value in terms.values())
    assert scorer.log_probs.grad is not None
    assert not scorer.log_probs.grad[~mask].any()
    assert (scorer.log_probs.grad[mask] != 0).float().mean() > 0.9


@pytest.mark.parametrize("gap", [30.0, 1000.0, -1000.0])
def test_a_ratio_that_would_overflow_stays_finite(gap: float) -> None:
    batch = make_batch()
    scorer = FixedScorer(batch["log_probs", "response"] + gap)
    loss, _ = make_objective(scorer, kl_coef=0.1)
    terms = loss(batch)
    total_of(terms).backward()
    assert all(math.isfinite(float(value.detach())) for value in terms.values())
    assert scorer.log_probs.grad is not None and torch.isfinite(scorer.log_probs.grad).all()


def test_a_group_of_equal_rewards_contributes_exactly_nothing() -> None:
    model = make_model()
    batch = near(model, make_batch(P=2, G=4))
    rewards = torch.tensor([[0.1, 0.1, 0.1, 0.1], [0.0, 1.0, 0.3, 0.3]])
    batch["advantage"] = group_advantage(rewards, "unbiased", 1e-4)[..., None]
    loss, _ = make_objective(TokenScorer(model))
    assert not batch["advantage"][0].any()
    model.zero_grad()
    terms = loss(batch[:1])
    total_of(terms).backward()
    assert float(terms["loss_objective"].detach()) == 0
    assert all(not g.any() for g in gradients(model).values())
    model.zero_grad()
    total_of(loss(batch[1:])).backward()
    assert any(g.any() for g in gradients(model).values())


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_the_clip_takes_the_gradient_only_where_the_paper_says(advantage: float) -> None:
    ratio = torch.tensor([0.5, 0.79, 0.81, 1.0, 1.27, 1.29, 3.0], dtype=torch.float64)
    log_ratio = ratio.log().requires_grad_()
    objective, clipped = clip(log_ratio, log_ratio, torch.tensor(advantage), Bounds(0.2, 0.28))
    assert clipped is not None
    objective.sum().backward()
    gone = ratio > 1.28 if advantage > 0 else ratio < 0.8
    assert clipped.tolist() == gone.tolist()
    torch.testing.assert_close(log_ratio.grad, torch.where(gone, 0.0, ratio * advantage))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimators_by_definition(kind: str) -> None:
    new, ref = torch.randn(2, 50, dtype=torch.float64).unbind()
    torch.testing.assert_close(kl_estimate(new, ref, kind), k_by_hand(kind, new, ref))


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kind: str) -> None:
    # Exactly, as an expectation over the vocabulary instead of over samples.
    g = torch.Generator().manual_seed(0)
    new, ref = torch.log_softmax(torch.randn(2, 9, generator=g, dtype=torch.float64), -1).unbind()
    exact = (new.exp() * (new - ref)).sum()
    torch.testing.assert_close((new.exp() * kl_estimate(new, ref, kind)).sum(), exact)


@given(st.floats(-500, 500), st.floats(-500, 500))
def test_k3_is_never_negative_and_always_finite(new: float, ref: float) -> None:
    value = float(kl_estimate(torch.tensor(new), torch.tensor(ref), "k3"))
    assert value >= -1e-6 and math.isfinite(value)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")
    with pytest.raises(ValueError, match="sigma"):
        group_advantage(torch.zeros(1, 2), "sigma", 0.0)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("std,divisor", [("population", 4), ("unbiased", 3), ("none", None)])
def test_advantage_by_the_formula(std: str, divisor: int | None) -> None:
    rewards = [[0.0, 1.0, 1.0, 0.0], [2.0, 2.0, 2.0, 3.5]]
    computed = group_advantage(torch.tensor(rewards), std, 1e-4)
    for row, advantages in zip(rewards, computed.tolist(), strict=True):
        mean = sum(row) / 4
        scale = 1.0
        if divisor is not None:
            scale = math.sqrt(sum((r - mean) ** 2 for r in row) / divisor) + 1e-4
        assert advantages == pytest.approx([(r - mean) / scale for r in row], **EQUAL)


@pytest.mark.parametrize("std", ["population", "unbiased", "none"])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e6 + 0.1, -7.7])
@pytest.mark.parametrize("samples", [1, 2, 3, 7])
@pytest.mark.filterwarnings("ignore:std.*degrees of freedom")  # a group of one
def test_equal_rewards_give_exactly_zero(std: str, value: float, samples: int) -> None:
    # 0.1 + ... + 0.1 divided by 7 is not 0.1, and eps may be 0.
    assert group_advantage(torch.full((2, samples), value), std, 0.0).tolist() == [[0.0] * samples] * 2


@pytest.mark.parametrize("std", ["population", "unbiased", "batch", "none"])
@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("value", [0.3, 1.0, -1000.0, 1e-6, 1e30])
def test_rewards_that_differ_by_rounding_only_are_equal(std: str, leave_one_out: bool, value: float) -> None:
    next_up = torch.nextafter(torch.tensor(value), torch.tensor(math.inf))
    rewards = torch.full((2, 4), value)
    rewards[:, 1] = next_up
    rewards[1, 2] = torch.nextafter(next_up, torch.tensor(math.inf))
    assert rewards.unique().numel() == 3
    assert is_constant(rewards).all()
    assert not group_advantage(rewards, std, 0.0, leave_one_out).any()
    # Ten times as far apart they are rewards of their own.
    rewards[0, 1] = value + abs(value) * 2e-6
    assert is_constant(rewards).tolist() == [False, True]
    assert group_advantage(rewards, std, 0.0, leave_one_out)[0].abs().min() > 0


def test_sums_of_the_same_rewards_in_another_order_are_equal() -> None:
    rewards = torch.tensor([[0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, 0.6, 0.6]])
    doubles = torch.tensor([[0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, 0.6, 0.6]], dtype=torch.float64)
    assert doubles.unique().numel() > 1
    for values in (rewards, doubles):
        assert not group_advantage(values, "unbiased", 0.0).any()


def test_rewards_that_cancel_leave_nothing() -> None:
    reward = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    rewards = torch.stack([reward] * 3, -1)
    advantages = decoupled_advantage(rewards, (0.1, 0.2, -0.3), "unbiased", 0.0, False)
    assert not advantages.any()
    rewards[0, :, 2] = torch.tensor([0.0, 1.0, 0.0, 1.0])
    advantages = decoupled_advantage(rewards, (0.1, 0.2, -0.3), "unbiased", 0.0, False)
    assert advantages[0].any() and not advantages[1:].any()
    assert float(advantages.std()) == pytest.approx(1.0)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_rewards_that_are_no_numbers_are_no_constant_unless_equal(value: float) -> None:
    rewards = torch.tensor([[value] * 3, [value, 1.0, 2.0]])
    assert is_constant(rewards).tolist() == [math.isinf(value), False]


@settings(max_examples=60, deadline=None)
@given(REWARDS, st.floats(-5, 5, width=32), st.sampled_from(["population", "unbiased", "none"]))
def test_advantages_do_not_change_under_a_shift(rewards: list[list[float]], shift: float, std: str) -> None:
    values = torch.tensor(rewards, dtype=torch.float64)
    advantages, other = group_advantage(values, std, 1e-2), group_advantage(values + shift, std, 1e-2)
    torch.testing.assert_close(advantages, other, atol=1e-9, rtol=1e-6)


@settings(max_examples=60, deadline=None)
@given(REWARDS, st.permutations(range(4)), st.sampled_from(["population", "unbiased", "none"]))
def test_advantages_follow_their_samples_and_centre_on_zero(
    rewards: list[list[float]], order: list[int], std: str
) -> None:
    values = torch.tensor(rewards, dtype=torch.float64)
    advantages = group_advantage(values, std, 1e-2)
    torch.testing.assert_close(group_advantage(values[:, order], std, 1e-2), advantages[:, order])
    torch.testing.assert_close(
        advantages.sum(-1), torch.zeros(len(rewards), dtype=torch.float64), atol=1e-9, rtol=0
    )


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_in_the_reward_is_summed_over_the_response(kind: str) -> None:
    batch = make_batch(P=2, G=3)
    mask = batch["masks", "response"]
    rewards = batch["next", "reward"].squeeze(-1).tolist()
    log_probs, reference = batch["log_probs", "response"], batch["log_probs", "reference"]
    for p in range(2):
        for s in range(3):
            kept = mask[p, s]
            rewards[p][s] -= 0.2 * float(k_by_hand(kind, log_probs[p, s][kept], reference[p, s][kept]).sum())
    expected = group_advantage(torch.tensor(rewards), "population", 1e-4)
    # Padding must not leak in, whatever stands there.
    batch["log_probs", "reference"] = reference.masked_fill(~mask, 3.0)
    _, advantage = make_objective(
        FixedScorer(log_probs), advantage_std="population", kl_coef=0.2, kl_estimator=kind, kl_in="reward"
    )
    written = advantage.inv(batch)
    torch.testing.assert_close(written["advantage"].squeeze(-1), expected, **EXACT)
    assert written["advantage"].dtype == torch.float32
    # The reward that is logged stays the reward.
    torch.testing.assert_close(written["next", "reward"], batch["next", "reward"])


@pytest.mark.parametrize("proximal", ["engine", "trainer"])
def test_the_gap_to_the_engine_is_measured_by_token_and_by_quarter(float64: None, proximal: str) -> None:
    # Values of the padding must not count.
    batch = widen(make_batch(P=2, G=3, T=9), 1, 2)
    mask = batch["masks", "loss"]
    torch.manual_seed(0)
    new = batch["log_probs", "response"] + 0.2 * torch.randn(mask.shape, dtype=torch.float64)
    new = torch.where(mask, new, 50.0)
    cfg = PolicyConfig(proximal=Proximal(proximal))
    out = GroupPolicyLoss(FixedScorer(new), cfg, has_proximal_log_probs=False)(batch)
    outside, sums, counts = 0, [0.0] * 4, [0] * 4
    for group, sample in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
        gaps = (new - batch["log_probs", "response"])[group, sample][mask[group, sample]].tolist()
        for position, gap in enumerate(gaps):
            outside += not 0.9 <= math.exp(gap) <= 1.1
            sums[4 * position // len(gaps)] += math.exp(gap) - 1 - gap
            counts[4 * position // len(gaps)] += 1
    tokens = int(mask.sum())
    assert 0 < outside < tokens and float(out["ratio_outside"]) == pytest.approx(outside / tokens)
    for quarter in range(4):
        assert float(out[f"kl_quarter_{quarter + 1}"]) == pytest.approx(sums[quarter] / tokens)
        assert float(out[f"quarter_{quarter + 1}"]) == pytest.approx(counts[quarter] / tokens)
