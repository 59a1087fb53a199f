"""Every preset, and every ingredient that no preset turns on, against loops written from the papers."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import FixedScorer, gradients, inputs, make_batch, make_model, make_objective, split, widen
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_by_hand import advantages_by_hand, counted, loss_by_hand
from omegaconf import OmegaConf
from rounding import EQUAL, EXACT
from slow_cases import slow_except
from tensordict import TensorDict
from torch import Tensor

from torchrl_grpo.config.schema import PolicyConfig
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.objectives.aggregation import count_totals
from torchrl_grpo.objectives.coefficients import EntropyCoefficient, KLCoefficient
from torchrl_grpo.objectives.maxent import listwise_weights

POLICIES = Path(__file__).resolve().parents[2] / "config" / "policy"
PRESETS = sorted(path.stem for path in POLICIES.glob("*.yaml"))
LONGEST = 6

# Ingredients that the presets leave at their defaults.
VARIANTS: dict[str, dict[str, Any]] = {
    "population": {"advantage_std": "population"},
    "batch std": {"advantage_std": "batch"},
    "leave one out, std": {"advantage_estimator": "leave_one_out"},
    "shift, scale and clip": {"reward_shift": 0.3, "reward_scale": 2.0, "reward_clip": 1.0},
    "drop": {"constant_groups": "drop"},
    "drop, sequence": {"constant_groups": "drop", "aggregation": "sequence"},
    "mask overlong": {"overlong": "mask"},
    "mask overlong, sequence": {"overlong": "mask", "aggregation": "sequence"},
    "mask overlong, constant": {"overlong": "mask", "aggregation": "constant", "aggregation_length": 11},
    "penalise over 3 tokens": {"overlong": "penalise", "overlong_buffer": 3},
    "dual clip": {"dual_clip": 1.3},
    "cispo with a lower bound": {"surrogate": "cispo"},
    "cispo of sequences": {"surrogate": "cispo", "ratio": "sequence"},
    "reinforce": {"surrogate": "log_likelihood"},
    "gates": {"surrogate": "sapo", "surrogate_args": {"temperature_negative": 3.0}},
    "k2 in the loss": {"kl_coef": 0.2, "kl_estimator": "k2"},
    "k3 in the loss, sequence": {"kl_coef": 0.2, "aggregation": "sequence"},
    "k1 in the reward": {"kl_coef": 0.2, "kl_estimator": "k1", "kl_in": "reward"},
    "KL to the sampler": {"kl_inference_coef": 0.4},
    "KL to both": {"kl_inference_coef": 0.4, "kl_coef": 0.1},
    "proximal": {"proximal": "trainer"},
    "a teacher beside rewards": {"distill_coef": 0.3, "proximal": "trainer"},
    "TIS": {"proximal": "trainer", "correction": "truncate", "correction_cap": 1.1},
    "TIS of trajectories": {
        "proximal": "trainer",
        "correction": "truncate",
        "correction_level": "trajectory",
    },
    "band": {"proximal": "trainer", "correction": "mask", "correction_cap": 1.3, "correction_floor": 0.8},
    "band of sequences": {
        "proximal": "trainer",
        "correction": "mask",
        "correction_level": "sequence",
        "correction_cap": 1.1,
        "correction_floor": 0.9,
    },
    "decoupled PPO": {"proximal": "trainer", "correction": "mask", "correction_cap": 1.2},
    "maxent likelihood": {
        "advantage_estimator": "maxent",
        "surrogate": "log_likelihood",
        "kl_in": "weights",
        "kl_coef": 0.5,
        "aggregation": "sequence",
        "q_epsilon": 0.01,
    },
    "maxent, whole responses": {
        "advantage_estimator": "maxent",
        "kl_in": "weights",
        "kl_coef": 0.1,
        "length_normalize_ref": False,
        "q_temperature": 0.5,
    },
}


def preset(name: str) -> dict[str, Any]:
    """The keys of a preset's file and of those it starts from."""
    node: Any = OmegaConf.to_container(OmegaConf.load(POLICIES / f"{name}.yaml"))
    defaults = node.pop("defaults", [])
    keys: dict[str, Any] = {}
    for base in defaults:
        keys |= preset(base) if base != "_self_" else node
    return keys if defaults else dict(node)


def settings_of(case: str) -> dict[str, Any]:
    return preset(case) if case in PRESETS else VARIANTS[case]


CASES = [*PRESETS, *VARIANTS]


def groups(dtype: torch.dtype, seed: int = 3) -> tuple[TensorDict, Tensor]:
    """A ragged batch in which every ingredient has something to do, and the policy's log-probabilities."""
    batch = make_batch(P=5, G=4, T=LONGEST, seed=seed)
    g = torch.Generator().manual_seed(seed)
    batch["next", "reward"][1] = 0.7
    batch["truncated"] = (batch["masks", "response"].sum(-1) == LONGEST).unsqueeze(-1)
    assert 1 < int(batch["truncated"].sum()) < 10
    engine = batch["log_probs", "response"]
    proximal = engine + 0.2 * torch.randn(engine.shape, generator=g)
    batch["log_probs", "proximal"] = proximal
    batch["log_probs", "reference"] = engine + 0.4 * torch.randn(engine.shape, generator=g)
    new = engine + 0.3 * torch.randn(engine.shape, generator=g)
    floats = batch.apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
    return floats, new.to(dtype)


def largest_relative(actual: Tensor, expected: Tensor, size: float = 0.0) -> float:
    """Largest difference, relative to the largest entry, or to ``size`` if that is larger."""
    return float((actual.double() - expected).abs().max() / expected.abs().max().clamp(min=size))


def differences(case: str, dtype: torch.dtype, seed: int = 3) -> tuple[float, float]:
    """Of value and gradient, between the package in ``dtype`` and the loop in float64."""
    keys = settings_of(case)
    batch, new = groups(dtype, seed)
    scorer = FixedScorer(new)
    loss, advantage = make_objective(scorer, LONGEST, **keys)
    written = advantage.inv(batch.clone())
    terms = loss(written)
    value = torch.stack([term for name, term in terms.items() if name.startswith("loss_")]).sum()
    value.backward()
    leaf = new.double().clone().requires_grad_()
    expected = loss_by_hand(PolicyConfig(**keys), batch, leaf, LONGEST)
    (gradient,) = torch.autograd.grad(expected, leaf)
    assert scorer.log_probs.grad is not None and gradient.abs().max() > 1e-3
    return (
        # Terms cancel in the sum, and what rounding takes from each of them does not.
        largest_relative(value.detach(), expected.detach(), float(gradient.abs().sum())),
        largest_relative(scorer.log_probs.grad, gradient),
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype,bound", [(torch.float64, 1e-6), (torch.float32, 1e-4)], ids=["f64", "f32"])
def test_value_and_gradient_equal_the_loop_of_the_paper(case: str, dtype: torch.dtype, bound: float) -> None:
    for seed in (3, 9):
        value, gradient = differences(case, dtype, seed)
        assert value <= bound and gradient <= bound


@pytest.mark.parametrize("case", CASES)
def test_advantages_and_counted_tokens_equal_the_loop_of_the_paper(case: str) -> None:
    keys = settings_of(case)
    batch, new = groups(torch.float64)
    _, advantage = make_objective(FixedScorer(new), LONGEST, **keys)
    written = advantage.inv(batch.clone())
    expected = torch.tensor(advantages_by_hand(PolicyConfig(**keys), batch, LONGEST), dtype=torch.float64)
    torch.testing.assert_close(written["advantage"].squeeze(-1), expected, atol=1e-9, rtol=1e-9)
    assert written["masks", "loss"].tolist() == counted(PolicyConfig(**keys), batch)


@pytest.mark.parametrize("case", CASES)
def test_a_case_is_not_the_default_in_disguise(case: str) -> None:
    if case == "grpo":
        return
    batch, new = groups(torch.float64)
    grads = []
    for keys in (settings_of(case), {}):
        scorer = FixedScorer(new)
        loss, advantage = make_objective(scorer, LONGEST, **keys)
        terms = loss(advantage.inv(batch.clone()))
        sum(term for name, term in terms.items() if name.startswith("loss_")).backward()
        assert scorer.log_probs.grad is not None
        grads.append(scorer.log_probs.grad)
    assert largest_relative(grads[0], grads[1]) > 1e-3


def test_every_key_of_the_policy_is_in_a_case() -> None:
    turned = {key for keys in VARIANTS.values() for key in keys}
    default = preset("grpo")
    turned |= {key for name in PRESETS for key, value in preset(name).items() if value != default[key]}
    elsewhere = {
        "advantage_eps",
        "max_refills",
        "reward_combination",
        "init_kl_coeff",
        "kl_target",
        "kl_horizon",
        "entropy_coef",
        "entropy_target",
        "entropy_delta",
        "entropy_coef_max",
        # tests/objectives/test_kl_gradients.py
        "distill_top_k",
    }
    assert {field.name for field in dataclasses.fields(PolicyConfig)} - turned - {"tau"} == elsewhere


# What must not matter


def total(terms: TensorDict) -> Tensor:
    return torch.stack([term for name, term in terms.items() if name.startswith("loss_")]).sum()


def model_gradients(case: str, batch: TensorDict, pieces: int = 1) -> tuple[float, dict[str, Tensor]]:
    model = make_model()
    loss, advantage = make_objective(
        TokenScorer(model), LONGEST, **{**settings_of(case), "entropy_coef": 0.01}
    )
    written = advantage.inv(batch.clone())
    written = written[written["masks", "loss"].any(-1).any(-1)]
    totals = count_totals(written["masks", "loss"])
    value = 0.0
    for piece in split(written, len(batch), pieces):
        term = total(loss(piece, totals=totals))
        term.backward()
        value += float(term.detach())
    return value, gradients(model)


def near_the_model() -> TensorDict:
    """Groups whose log-probabilities are a little off a small model's own."""
    batch = groups(torch.float32)[0][:4]
    with torch.no_grad():
        own = TokenScorer(make_model())(*inputs(batch)).log_probs
    g = torch.Generator().manual_seed(1)
    for key in ("response", "proximal", "reference"):
        batch["log_probs", key] = (own + 0.2 * torch.randn(own.shape, generator=g)) * batch[
            "masks", "response"
        ]
    return batch


def assert_same(first: tuple[float, dict[str, Tensor]], other: tuple[float, dict[str, Tensor]]) -> None:
    assert other[0] == pytest.approx(first[0], **EQUAL)
    for name, gradient in first[1].items():
        torch.testing.assert_close(other[1][name], gradient, **EXACT)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "case", slow_except(["grpo", "gspo"], [*PRESETS, "drop", "mask overlong, sequence", "band of sequences"])
)
def test_micro_batches_padding_and_order_change_nothing(case: str) -> None:
    batch = near_the_model()
    whole = model_gradients(case, batch)
    assert max(float(g.abs().max()) for g in whole[1].values()) > 1e-3
    for pieces in (2, 4, 8, 16):
        assert_same(whole, model_gradients(case, batch, pieces))
    assert_same(whole, model_gradients(case, widen(batch, 3, 5)))
    assert_same(whole, model_gradients(case, batch[[2, 0, 3, 1]]))


@pytest.mark.parametrize("case", [name for name in PRESETS if name != "distill"])
def test_a_group_of_equal_rewards_moves_nothing(case: str) -> None:
    keys = settings_of(case)
    if keys["kl_coef"]:
        # Responses of the same reward still differ in what the reference says of them.
        keys["kl_coef"] = 0.0
    keys["overlong"] = "keep"
    batch, new = groups(torch.float64)
    scorer = FixedScorer(new)
    loss, advantage = make_objective(scorer, LONGEST, **keys)
    total(loss(advantage.inv(batch.clone()))).backward()
    assert scorer.log_probs.grad is not None
    assert not scorer.log_probs.grad[1].any() or float(scorer.log_probs.grad[1].abs().max()) < 1e-12
    assert scorer.log_probs.grad[0].any()


@pytest.mark.parametrize("case", PRESETS)
@pytest.mark.parametrize("gap", [40.0, 1000.0, -1000.0])
def test_log_ratios_that_would_overflow_stay_finite(case: str, gap: float) -> None:
    batch, new = groups(torch.float32)
    scorer = FixedScorer(new + gap)
    loss, advantage = make_objective(scorer, LONGEST, **settings_of(case))
    terms = loss(advantage.inv(batch))
    total(terms).backward()
    assert all(math.isfinite(float(value.detach())) for value in terms.values())
    assert scorer.log_probs.grad is not None and torch.isfinite(scorer.log_probs.grad).all()


@pytest.mark.parametrize("case", PRESETS)
def test_masked_tokens_get_no_gradient(case: str) -> None:
    batch, new = groups(torch.float64)
    mask = batch["masks", "response"]
    for key in ("response", "reference", "proximal"):
        batch["log_probs", key] = batch["log_probs", key].masked_fill(~mask, math.nan)
    scorer = FixedScorer(new)
    loss, advantage = make_objective(scorer, LONGEST, **settings_of(case))
    total(loss(advantage.inv(batch))).backward()
    assert scorer.log_probs.grad is not None
    assert not scorer.log_probs.grad[~mask].any()
    assert torch.isfinite(scorer.log_probs.grad).all() and scorer.log_probs.grad[0].any()


@pytest.mark.parametrize("surrogate,cut", [("clip", 0.0), ("cispo", 1.2)])
def test_a_clipped_token_has_no_gradient_but_cispo_keeps_it(surrogate: str, cut: float) -> None:
    batch, _ = groups(torch.float64)
    scorer = FixedScorer(batch["log_probs", "response"] + math.log(2.0))
    loss, _ = make_objective(scorer, LONGEST, surrogate=surrogate)
    batch["advantage"] = torch.ones_like(batch["advantage"])
    terms = loss(batch)
    total(terms).backward()
    mask = batch["masks", "response"]
    assert float(terms["clip_fraction"]) == 1.0
    assert scorer.log_probs.grad is not None
    torch.testing.assert_close(
        scorer.log_probs.grad[mask], torch.full((int(mask.sum()),), -cut / int(mask.sum())).double()
    )


@settings(max_examples=50, deadline=None)
@given(st.floats(-0.9, 3.0), st.sampled_from([-1.0, 1.0]), st.sampled_from([0.1, 0.2, 0.5]))
def test_clip_bounds_are_exact_at_the_edge(shift: float, advantage: float, epsilon: float) -> None:
    from torchrl_grpo.objectives.surrogates import Bounds, clip

    for ratio in (1 + shift, 1 - epsilon, 1 + epsilon):
        log_ratio = torch.tensor(ratio, dtype=torch.float64).log().requires_grad_()
        objective, clipped = clip(log_ratio, log_ratio, torch.tensor(advantage), Bounds(epsilon, epsilon))
        r = log_ratio.detach().exp()
        bounded = min(max(float(r), 1 - epsilon), 1 + epsilon)
        assert float(objective.detach()) == pytest.approx(min(float(r) * advantage, bounded * advantage))
        outside = float(r) > 1 + epsilon if advantage > 0 else float(r) < 1 - epsilon
        assert clipped is not None and bool(clipped) == outside


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=4, max_size=4, unique=True), st.floats(0.1, 10))
def test_advantages_with_a_std_do_not_change_under_a_scale(rewards: list[float], scale: float) -> None:
    from torchrl_grpo.objectives.advantage import group_advantage

    values = torch.tensor([rewards, [1.0, 2.0, 3.0, 5.0]], dtype=torch.float64)
    if float(values[0].std()) < 1e-3:
        return
    for std in ("population", "unbiased", "batch"):
        advantages, other = group_advantage(values, std, 0.0), group_advantage(values * scale, std, 0.0)
        torch.testing.assert_close(advantages, other)


# Several rewards


def test_rewards_normalized_apart() -> None:
    # GDPO, eqs. 4 to 6, on two rewards of very different spread.
    parts = torch.tensor([[[0.0, 10.0], [1.0, 30.0], [1.0, 20.0]], [[1.0, 5.0], [0.0, 5.0], [0.0, 5.0]]])
    batch = make_batch(P=2, G=3)
    batch["next", "reward_parts"] = parts
    batch["next", "reward"] = parts.sum(-1, keepdim=True)
    _, advantage = make_objective(
        FixedScorer(batch["log_probs", "response"]),
        weights=(1.0, 0.5),
        reward_combination="apart",
        advantage_eps=0.0,
    )
    third = math.sqrt(1 / 3)
    a = [[-2 / 3 / third, 1 / 3 / third, 1 / 3 / third], [2 / 3 / third, -1 / 3 / third, -1 / 3 / third]]
    b = [[-1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    sums = [[x + 0.5 * y for x, y in zip(*rows, strict=True)] for rows in zip(a, b, strict=True)]
    flat = [x for row in sums for x in row]
    deviation = math.sqrt(sum(x * x for x in flat) / 5)
    expected = torch.tensor(sums) / deviation
    torch.testing.assert_close(advantage.inv(batch)["advantage"].squeeze(-1), expected)


def test_with_rewards_apart_a_group_has_a_signal_if_one_reward_has() -> None:
    batch = make_batch(P=3, G=2)
    # Sums that are equal of parts that differ; parts that are equal; a part that differs but does not count.
    parts = [[[1.0, 0.0, 5.0], [0.0, 0.5, 5.0]], [[1.0, 1.0, 5.0]] * 2, [[1.0, 1.0, 5.0], [1.0, 1.0, 6.0]]]
    weights = (0.5, 1.0, 0.0)
    batch["next", "reward_parts"] = torch.tensor(parts)
    batch["next", "reward"] = (torch.tensor(parts) * torch.tensor(weights)).sum(-1, keepdim=True)
    scorer = FixedScorer(batch["log_probs", "response"])
    for combination, flat in (("apart", [False, True, True]), ("together", [True, True, True])):
        _, advantage = make_objective(scorer, weights=weights, reward_combination=combination)
        assert advantage.no_signal_mask(batch).tolist() == flat


@pytest.mark.parametrize("combination", ["together", "apart"])
def test_rounding_that_a_shift_uncovers_is_no_signal(combination: str) -> None:
    batch = make_batch(P=2, G=4)
    rewards = torch.full((2, 4, 1), 0.7)
    rewards[0, 1] = torch.nextafter(rewards[0, 1], torch.tensor(1.0))
    rewards[1, 1] = 0.70001
    batch["next", "reward"], batch["next", "reward_parts"] = rewards, rewards.clone()
    keys: dict[str, Any] = {
        "reward_shift": -0.7,
        "reward_scale": 3.0,
        "advantage_eps": 0.0,
        "constant_groups": "drop",
    }
    _, advantage = make_objective(
        FixedScorer(batch["log_probs", "response"]), reward_combination=combination, **keys
    )
    written = advantage.inv(batch)
    assert advantage.no_signal_mask(batch).tolist() == [True, False]
    assert not written["advantage"][0].any() and written["advantage"][1].all()
    assert not written["masks", "loss"][0].any()


def test_a_length_penalty_is_no_signal() -> None:
    batch = make_batch(P=2, G=4)
    batch["next", "reward"][0] = 0.0
    _, advantage = make_objective(
        FixedScorer(batch["log_probs", "response"]), overlong="penalise", constant_groups="drop"
    )
    written = advantage.inv(batch)
    assert advantage.no_signal_mask(batch).tolist() == [True, False]
    assert written["advantage"][0].any() and not written["masks", "loss"][0].any()
    assert torch.equal(written["masks", "loss"][1], batch["masks", "response"][1])


def test_what_the_loss_reads_and_returns_follows_its_ingredients() -> None:
    batch, new = groups(torch.float32)
    scorer = FixedScorer(new)
    plain, _ = make_objective(scorer)
    assert set(plain.out_keys) == {"loss_objective"} and "advantage" in plain.in_keys
    assert not {("log_probs", "reference"), ("log_probs", "proximal")} & set(plain.in_keys)
    full, _ = make_objective(scorer, kl_coef=0.1, kl_inference_coef=0.1, entropy_coef=0.1, proximal="trainer")
    assert {("log_probs", "reference"), ("log_probs", "proximal")} <= set(full.in_keys)
    terms = full(batch)
    assert {name for name in terms.keys() if name.startswith("loss_")} == set(full.out_keys)  # noqa: SIM118


def test_the_mismatch_is_that_of_the_proximal_policy_to_the_engine() -> None:
    batch, new = groups(torch.float64)
    loss, _ = make_objective(FixedScorer(new), proximal="trainer")
    terms = loss(batch)
    mask = batch["masks", "response"]
    gap = (batch["log_probs", "proximal"] - batch["log_probs", "response"])[mask]
    torch.testing.assert_close(terms["mismatch_kl_approx"], (gap.exp() - 1 - gap).mean())
    torch.testing.assert_close(terms["mismatch_ratio"], gap.exp().mean())
    torch.testing.assert_close(terms["mismatch_ratio_squared"], (2 * gap).exp().mean())


@pytest.mark.parametrize("where", ["reward", "weights"])
def test_an_adapted_coefficient_counts_in_the_advantages(where: str) -> None:
    keys: dict[str, Any] = {
        "kl_in": where,
        "advantage_estimator": "maxent" if where == "weights" else "group_mean",
    }
    batch, new = groups(torch.float64)
    loss, advantage = make_objective(FixedScorer(new), init_kl_coeff=0.1, kl_target=0.1, **keys)
    loss.kl.value = 0.7
    expected = advantages_by_hand(PolicyConfig(kl_coef=0.7, **keys), batch, LONGEST)
    advantages = advantage.inv(batch.clone())["advantage"].squeeze(-1)
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float64))


# MaxEnt


def weights(utilities: list[float], ref: list[float], **options: Any) -> list[float]:
    options = {"tau": 0.1, "beta": 0.0, "q_temperature": 1.0, "q_epsilon": 0.0, **options}
    pair = torch.tensor([utilities], dtype=torch.float64), torch.tensor([ref], dtype=torch.float64)
    return listwise_weights(*pair, **options)[0].tolist()


def test_maxent_limits() -> None:
    u, ref = [0.2, 1.0, 0.5, 0.9], [-3.0, -9.0, -1.0, -2.0]
    # tau + beta to 0: the best response takes all.
    assert weights(u, ref, tau=1e-5) == pytest.approx([0, 1, 0, 0], abs=1e-9)
    # large tau: uniform.
    assert weights(u, ref, tau=1e6, beta=0.1) == pytest.approx([0.25] * 4, abs=1e-5)
    # beta far above tau and above log q: the reference's own distribution over the candidates.
    follows = [math.exp(value) for value in ref]
    assert weights(u, ref, tau=1e-9, beta=1e7) == pytest.approx(
        [value / sum(follows) for value in follows], rel=1e-5
    )
    # tau = 1, beta = 0: q itself.
    q = [math.exp(value) for value in u]
    assert weights(u, ref, tau=1.0) == pytest.approx([value / sum(q) for value in q])


def test_maxent_weights_maximize_what_they_are_said_to_maximize() -> None:
    g = torch.Generator().manual_seed(0)
    u, ref = torch.randn(2, 5, generator=g, dtype=torch.float64).unbind()
    tau, beta, eps = 0.3, 0.7, 0.01
    p = torch.softmax(u / 0.8, -1)
    log_q = (p * (1 - 5 * eps) + eps).log()

    def objective(w: Tensor) -> Tensor:
        log_w = w.log()
        # The reference need not be normalized over the candidates: that would only add a constant.
        return (w * log_q).sum() - beta * (w * (log_w - ref)).sum() - tau * (w * log_w).sum()

    best = listwise_weights(u[None], ref[None], tau=tau, beta=beta, q_temperature=0.8, q_epsilon=eps)[0]
    for _ in range(200):
        other = torch.softmax(best.log() + 0.1 * torch.randn(5, generator=g, dtype=torch.float64), -1)
        assert objective(other) <= objective(best) + 1e-12


@pytest.mark.parametrize("surrogate", ["clip", "log_likelihood"])
def test_maxent_trains_the_policy(surrogate: str) -> None:
    # An earlier implementation took the log-probabilities in the loss without their gradient.
    model, batch = make_model(), near_the_model()
    loss, advantage = make_objective(
        TokenScorer(model), LONGEST, **{**preset("maxent"), "surrogate": surrogate}
    )
    total(loss(advantage.inv(batch))).backward()
    assert all(float(g.abs().max()) > 0 for g in gradients(model).values())


# Coefficients


def test_kl_coefficient_by_the_formula() -> None:
    kl = KLCoefficient(0.1, target=0.05, horizon=100)
    kl.update(0.2, 10)  # far above: the error is cut to 0.2
    assert kl.value == pytest.approx(0.1 * 1.02)
    kl.update(0.055, 10)
    assert kl.value == pytest.approx(0.1 * 1.02 * 1.01)
    kl.update(0.0, 10)
    assert kl.value == pytest.approx(0.1 * 1.02 * 1.01 * 0.98)
    other = KLCoefficient(0.1, target=0.05, horizon=100)
    other.load_state_dict(kl.state_dict())
    assert other.value == kl.value
    constant = KLCoefficient(0.3)
    constant.update(10.0, 1000)
    constant.load_state_dict({"value": 9.0})
    assert constant.value == 0.3 and not KLCoefficient(0.0).in_use and KLCoefficient(0.0, 0.1).in_use


def test_entropy_coefficient_rises_below_its_target_and_rests_above() -> None:
    entropy = EntropyCoefficient(0.0, target=1.0, delta=0.25, largest=0.5)
    seen = []
    for measured in (0.5, 0.5, 0.5, 2.0, 2.0, 2.0, 0.5):
        entropy.update(measured)
        seen.append(entropy.value)
    assert seen == [0.25, 0.5, 0.5, 0.0, 0.0, 0.0, 0.25]
    other = EntropyCoefficient(0.0, target=1.0, delta=0.25, largest=0.5)
    other.load_state_dict(entropy.state_dict())
    assert other.state_dict() == entropy.state_dict() and other.value == 0.25
    constant = EntropyCoefficient(0.3)
    constant.update(0.0)
    assert constant.value == 0.3


@pytest.mark.usefixtures("float64")
def test_entropy_bonus_against_the_definition() -> None:
    model, batch = make_model(), near_the_model()
    scorer = TokenScorer(model, block_elements=7 * 61)  # several chunks: recomputed in the backward pass
    loss, advantage = make_objective(scorer, LONGEST, entropy_coef=0.5)
    terms = loss(advantage.inv(batch))
    terms["loss_entropy"].backward()
    grads = gradients(model)
    model.zero_grad()
    # Entropy of every response token from the model's own logits, one response at a time.
    entropies = []
    prompt, prompt_mask, response, mask = inputs(batch)
    for p in range(len(batch)):
        for s in range(response.shape[1]):
            ids = torch.cat([prompt[p][prompt_mask[p]], response[p, s][mask[p, s]]])
            count = int(mask[p, s].sum())
            log_p = torch.log_softmax(model(ids[None], use_cache=False).logits[0, -count - 1 : -1], -1)
            entropies.append(-(log_p.exp() * log_p).sum(-1))
    expected = -0.5 * torch.cat(entropies).mean()
    expected.backward()
    assert float(terms["loss_entropy"].detach()) == pytest.approx(float(expected.detach()), **EQUAL)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(grads[name], gradient, **EXACT)
