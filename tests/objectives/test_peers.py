"""The objective family against other libraries' own code, value and gradient by token, in float64.

Where ours differ on purpose, a test holds the difference, so that a new version of the peer shows in it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from batches import make_batch, make_objective
from peers import LONGEST, Numbers, Outcome, gradients_of, torchrl_terms
from tensordict import TensorDict
from torch import Tensor

from torchrl_grpo.cli.compose import composer, open_free_form
from torchrl_grpo.config import parse
from torchrl_grpo.models.scoring.scores import TokenScores
from torchrl_grpo.objectives.advantage import group_advantage, overlong_penalty
from torchrl_grpo.objectives.aggregation import count_totals
from torchrl_grpo.objectives.coefficients import EntropyCoefficient

if TYPE_CHECKING:
    from trl_peer import Trl

# Importing TRL takes seconds.
pytestmark = pytest.mark.slow

CONFIG = Path(__file__).resolve().parents[2] / "config"
GROUP, LENGTH = 4, 8
# Rounding of float64, far below any wrong constant.
TOLERANCE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-12}


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    # Constants that our code and the peers make on the way are of this type, too.
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="module")
def trl(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Trl:
    from trl_peer import Trl

    return Trl(tiny_model_dir, tmp_path_factory.mktemp("trl"))


@functools.cache
def preset(name: str) -> dict[str, Any]:
    """The keys of a shipped preset, as a run gets them."""
    with composer(CONFIG, "grpo_gsm8k") as tree:
        (overrides,) = tree.jobs([open_free_form(f"policy={name}")], sweep=False)
        return dataclasses.asdict(parse(tree.compose(overrides).node).policy)


class Case:
    """A batch of 4 groups, and a policy some updates away from the one that sampled it.

    Args:
        group: responses of a prompt.
        ragged: responses of all lengths instead of one.
        spread: standard deviation of the policy's log-probabilities from the sampled ones.
        engine: that of the engine's from the trainer's; 0 is an engine that is the trainer.
        rewards: weights of the rewards.
        truncated: share of the responses that reached their bound.
        seed: of all random numbers.
    """

    def __init__(
        self,
        spread: float = 0.3,
        engine: float = 0.0,
        group: int = GROUP,
        ragged: bool = True,
        rewards: tuple[float, ...] = (1.0,),
        truncated: float = 0.0,
        seed: int = 0,
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        batch = make_batch(P=4, G=group, T=LENGTH, seed=seed)
        if not ragged:
            batch["masks", "response"] = torch.ones_like(batch["masks", "response"])
        old = batch["log_probs", "response"]

        def noise() -> Tensor:
            return torch.randn(old.shape, generator=g)

        # TRL keeps rewards in float32.
        parts = torch.randn(*old.shape[:2], len(rewards), generator=g).float().to(old.dtype)
        batch["next", "reward_parts"] = parts
        batch["next", "reward"] = (parts * torch.tensor(rewards)).sum(-1, keepdim=True)
        batch["truncated"] = torch.rand(*old.shape[:2], 1, generator=g) < truncated
        batch["log_probs", "proximal"] = old
        batch["log_probs", "response"] = old + engine * noise()
        # Neither of the two leaves is masked: padding must not count.
        self.log_probs, self.entropy = old + spread * noise(), noise().abs()
        self.batch, self.weights = batch, rewards

    @property
    def numbers(self) -> Numbers:
        return Numbers(self.batch, self.log_probs, self.entropy)

    @property
    def advantage(self) -> Tensor:
        """GRPO's, of the rewards, ``[P, G, 1]``."""
        return group_advantage(self.batch["next", "reward"].squeeze(-1), "unbiased", 1e-4).unsqueeze(-1)

    def ours(self, pieces: int = 1, **policy: Any) -> Outcome:
        """Rewards to advantages to the loss of an optimizer step, in so many micro-batches."""
        return self.terms(pieces, **policy)[0]

    def terms(self, pieces: int = 1, own_totals: bool = False, **policy: Any) -> tuple[Outcome, TensorDict]:
        """The same and the last micro-batch's terms; ``own_totals`` makes each micro-batch a batch."""
        scorer = Scorer()
        loss, advantage = make_objective(scorer, max_new_tokens=LONGEST, weights=self.weights, **policy)
        written = advantage.inv(self.batch.clone())
        totals = None if own_totals else count_totals(written["masks", "loss"])
        log_probs, entropy = (x.clone().requires_grad_() for x in (self.log_probs, self.entropy))
        value = torch.zeros(())
        for rows in torch.arange(len(written)).chunk(pieces):
            scorer.answer = TokenScores(log_probs[rows], entropy[rows])
            terms = loss(written[rows], totals=totals)
            total = sum((term for name, term in terms.items() if name.startswith("loss_")), torch.zeros(()))
            total.backward()
            value += total.detach()
        return gradients_of(value, log_probs, entropy), terms


class Scorer(torch.nn.Module):
    """Answers what it is told."""

    answer: TokenScores
    entropy_gradient = False

    def forward(self, *_: Tensor) -> TokenScores:
        return self.answer


def assert_equal(ours: Outcome, theirs: Outcome) -> None:
    assert ours.gradient.abs().max() > 1e-3, "nothing was compared"
    for name in Outcome._fields:
        a, b = getattr(ours, name), getattr(theirs, name)
        torch.testing.assert_close(a, b, **TOLERANCE, msg=lambda m, name=name: f"{name}: {m}")  # type: ignore[misc]


def assert_different(ours: Outcome, theirs: Outcome) -> None:
    assert (ours.gradient - theirs.gradient).abs().max() > 1e-3 * theirs.gradient.abs().max()


# GRPO's own term (arXiv 2402.03300, eq. 3); for what TRL does unless told, see the test of the ratio in it.
KL = {"beta": 0.1, "use_bias_correction_kl": False}

# By name: our preset, keys on top of it, TRL's settings, and the batch.
PRESETS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "grpo": ("grpo", {}, {"loss_type": "dapo"}, {}),
    "grpo-kl": ("grpo", {"kl_coef": 0.1}, {"loss_type": "dapo", **KL}, {}),
    "grpo-token": ("grpo", {}, {"loss_type": "bnpo"}, {}),
    "grpo-sequence": ("grpo", {"aggregation": "sequence"}, {"loss_type": "grpo"}, {}),
    "grpo-sequence-kl": (
        "grpo",
        {"aggregation": "sequence", "kl_coef": 0.1},
        {"loss_type": "grpo", **KL},
        {},
    ),
    "grpo-batch-std": (
        "grpo",
        {"advantage_std": "batch"},
        {"loss_type": "dapo", "scale_rewards": "batch"},
        {},
    ),
    "grpo-dual-clip": ("grpo", {"dual_clip": 1.5}, {"loss_type": "dapo", "delta": 1.5}, {}),
    "grpo-entropy": (
        "grpo",
        {"entropy_coef": 0.01, "aggregation": "sequence"},
        {"loss_type": "grpo", "entropy_coef": 0.01},
        {},
    ),
    "grpo-two-rewards": (
        "grpo",
        {},
        {"loss_type": "dapo", "reward_weights": [1.0, 0.25]},
        {"rewards": (1.0, 0.25)},
    ),
    "gdpo": (
        "grpo",
        {"reward_combination": "apart"},
        {
            "loss_type": "dapo",
            "multi_objective_aggregation": "normalize_then_sum",
            "reward_weights": [1.0, 0.25],
        },
        {"rewards": (1.0, 0.25)},
    ),
    "grpo-mask-overlong": (
        "grpo",
        {"overlong": "mask"},
        {"loss_type": "dapo", "mask_truncated_completions": True},
        {"truncated": 0.4},
    ),
    "dapo": ("dapo", {"overlong": "keep"}, {"loss_type": "dapo", "epsilon_high": 0.28}, {}),
    "dr_grpo": ("dr_grpo", {}, {"loss_type": "dr_grpo", "scale_rewards": "none"}, {}),
    "dr_grpo-kl": (
        "dr_grpo",
        {"kl_coef": 0.1, "entropy_coef": 0.01},
        {"loss_type": "dr_grpo", "scale_rewards": "none", **KL, "entropy_coef": 0.01},
        {},
    ),
    "gspo": (
        "gspo",
        {},
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 3e-4,
            "epsilon_high": 4e-4,
        },
        {"spread": 1e-3},
    ),
    "gspo-token-mean": (
        "gspo",
        {"aggregation": "token", "clip_epsilon": 0.1, "clip_epsilon_high": 0.1, "kl_coef": 0.1},
        {"loss_type": "bnpo", "importance_sampling_level": "sequence", "epsilon": 0.1, **KL},
        {},
    ),
    # The mean of a response times its length.
    "luspo": (
        "gspo",
        {"aggregation": "constant", "aggregation_length": 1},
        {
            "loss_type": "luspo",
            "importance_sampling_level": "sequence",
            "epsilon": 3e-4,
            "epsilon_high": 4e-4,
        },
        {"spread": 1e-3},
    ),
    "cispo": ("cispo", {}, {"loss_type": "cispo", "epsilon_high": 5.0}, {"spread": 1.5}),
    "cispo-kl": (
        "cispo",
        {"kl_coef": 0.1, "entropy_coef": 0.01},
        {"loss_type": "cispo", "epsilon_high": 5.0, **KL, "entropy_coef": 0.01},
        {"spread": 1.5},
    ),
    "sapo": ("sapo", {}, {"loss_type": "sapo"}, {"spread": 0.6}),
    "sapo-temperatures": (
        "sapo",
        {"surrogate_args": {"temperature_positive": 0.5, "temperature_negative": 2.0}, "kl_coef": 0.1},
        {"loss_type": "sapo", "sapo_temperature_pos": 0.5, "sapo_temperature_neg": 2.0, **KL},
        {"spread": 0.6},
    ),
    "rloo": ("rloo", {}, {"kind": "rloo", "beta": 0.0}, {"spread": 0.2}),
    "rloo-kl": ("rloo", {"kl_coef": 0.1}, {"kind": "rloo", "beta": 0.1}, {"spread": 0.2}),
    "rloo-clipped-rewards": (
        "rloo",
        {"kl_coef": 0.1, "reward_clip": 0.5, "clip_epsilon_high": 0.28},
        {"kind": "rloo", "beta": 0.1, "reward_clip_range": (-0.5, 0.5), "epsilon_high": 0.28},
        {"spread": 0.2},
    ),
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_what_trl_computes(trl: Trl, name: str) -> None:
    base, keys, settings, batch = PRESETS[name]
    case = Case(**batch)
    policy = {**preset(base), **keys}
    ours, terms = case.terms(**policy)
    assert_equal(ours, trl.outcome(case.numbers, num_generations=GROUP, **settings))
    if policy["surrogate"] != "sapo":
        assert 0 < float(terms["clip_fraction"]) < 1, "no bound was tested"


CORRECTIONS = [
    ("token_truncate", "truncate", "token", {}),
    ("sequence_truncate", "truncate", "trajectory", {}),
    ("token_mask", "mask", "token", {}),
    ("sequence_mask", "mask", "trajectory", {}),
    ("token_mask", "mask", "token", {"floor": 0.8}),
    ("sequence_mask", "mask", "trajectory", {"floor": 0.8}),
]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo-kl", "gspo", "cispo", "sapo-temperatures"])
@pytest.mark.parametrize("mode,kind,level,bounds", CORRECTIONS)
def test_the_correction_for_an_engine_is_trls(
    trl: Trl, name: str, mode: str, kind: str, level: str, bounds: dict[str, float]
) -> None:
    base, keys, settings, batch = PRESETS[name]
    case = Case(**batch, engine=0.4)
    correction = {
        "proximal": "trainer",
        "correction": kind,
        "correction_level": level,
        "correction_cap": 1.3,
        "correction_floor": bounds.get("floor", 0.0),
    }
    ours, terms = case.terms(**{**preset(base), **keys, **correction})
    theirs = trl.outcome(
        case.numbers,
        num_generations=GROUP,
        use_vllm=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_max=1.3,
        vllm_importance_sampling_clip_min=bounds.get("floor"),
        **settings,
    )
    assert_equal(ours, theirs)
    assert float(terms["correction"]) != 1
    assert (float(terms["correction_zero"]) > 0) == (kind == "mask")


def test_ratios_to_the_trainer_without_a_correction_are_trls(trl: Trl) -> None:
    case = Case(engine=0.4)
    settings: dict[str, Any] = {"use_vllm": True, "vllm_importance_sampling_correction": False}
    theirs = trl.outcome(case.numbers, num_generations=GROUP, loss_type="dapo", **settings)
    assert_equal(case.ours(**{**preset("grpo"), "proximal": "trainer"}), theirs)
    assert_different(case.ours(**preset("grpo")), theirs)


def test_the_likelihood_has_the_gradient_of_trls_first_update(trl: Trl) -> None:
    # There the ratio is 1, and TRL takes it to the policy itself.
    case = Case()
    theirs = trl.outcome(case.numbers, num_generations=GROUP, loss_type="grpo", num_iterations=1)
    ours = case.ours(**{**preset("grpo"), "surrogate": "log_likelihood", "aggregation": "sequence"})
    torch.testing.assert_close(ours.gradient, theirs.gradient, **TOLERANCE)
    assert ours.gradient.abs().max() > 1e-3


@pytest.mark.parametrize("length,buffer", [(20, 4), (20, 5), (20, 20), (7, 1)])
def test_the_overlong_penalty_is_trls(length: int, buffer: int) -> None:
    from trl.rewards import get_soft_overlong_punishment

    lengths = range(1, length + 1)
    theirs = get_soft_overlong_punishment(length, buffer)([[0] * n for n in lengths])
    assert overlong_penalty(torch.tensor(lengths), length, buffer).tolist() == pytest.approx(
        theirs, rel=1e-12
    )


@pytest.mark.parametrize("combination", ["together", "apart"])
def test_the_overlong_penalty_is_one_more_of_trls_rewards(trl: Trl, combination: str) -> None:
    from trl.rewards import get_soft_overlong_punishment

    # A buffer of a power of 2, as TRL keeps rewards in float32.
    case = Case()
    penalty = get_soft_overlong_punishment(LONGEST, 8)(case.numbers.responses)
    theirs_case = Case()
    parts = case.batch["next", "reward_parts"]
    theirs_case.batch["next", "reward_parts"] = torch.cat(
        [parts, torch.tensor(penalty).view(4, GROUP, 1)], -1
    )
    theirs = trl.outcome(
        theirs_case.numbers,
        num_generations=GROUP,
        loss_type="dapo",
        epsilon_high=0.28,
        multi_objective_aggregation={"together": "sum_then_normalize", "apart": "normalize_then_sum"}[
            combination
        ],
    )
    keys = {"overlong_buffer": 8, "reward_combination": combination}
    assert_equal(case.ours(**{**preset("dapo"), **keys}), theirs)
    assert 0 in penalty and len(set(penalty)) > 3


@pytest.mark.parametrize("name", ["grpo", "grpo-sequence-kl", "dr_grpo", "cispo", "sapo", "gspo"])
@pytest.mark.parametrize("pieces", [2, 4])
def test_micro_batches_add_up_to_what_trls_do(trl: Trl, name: str, pieces: int) -> None:
    base, keys, settings, batch = PRESETS[name]
    case = Case(**batch)
    theirs = trl.outcome(case.numbers, num_generations=GROUP, pieces=pieces, **settings)
    assert_equal(case.ours(pieces, **{**preset(base), **keys}), theirs)


def test_trl_takes_two_means_by_micro_batch(trl: Trl) -> None:
    """The mean over tokens of ``bnpo``, and that of the entropy, whatever the loss.

    There a token of a micro-batch of short responses weighs more than another, and the loss depends on how a
    batch is cut. Ours are means over the whole batch.
    """
    case = Case()
    policy = {**preset("grpo"), "entropy_coef": 0.1}
    settings: dict[str, Any] = {"num_generations": GROUP, "entropy_coef": 0.1}
    whole = trl.outcome(case.numbers, loss_type="bnpo", **settings)
    cut = trl.outcome(case.numbers, loss_type="bnpo", pieces=4, **settings)
    assert_equal(case.ours(4, **policy), whole)
    assert_different(case.ours(4, **policy), cut)
    # That is all: with each micro-batch as a batch of its own, ours are theirs.
    by_piece, _ = case.terms(4, own_totals=True, **policy)
    assert_equal(Outcome(*(x / 4 for x in by_piece)), cut)
    # The other loss is cut nowhere, its entropy is.
    dapo = trl.outcome(case.numbers, loss_type="dapo", pieces=4, **settings)
    torch.testing.assert_close(dapo.gradient, whole.gradient, **TOLERANCE)
    torch.testing.assert_close(dapo.entropy_gradient, cut.entropy_gradient, **TOLERANCE)
    assert not torch.allclose(dapo.entropy_gradient, whole.entropy_gradient)


@pytest.mark.parametrize("name", ["grpo-sequence-kl", "dr_grpo-kl", "gspo", "sapo"])
def test_trl_counts_masked_responses_in_means_over_responses(trl: Trl, name: str) -> None:
    """With truncated responses masked, TRL's losses shrink by their share; ours are means of the rest."""
    base, keys, settings, batch = PRESETS[name]
    # The entropy is a mean over tokens in either.
    policy = {**preset(base), **keys, "overlong": "mask", "entropy_coef": 0.0}
    case = Case(**batch, truncated=0.4)
    settings = {**settings, "mask_truncated_completions": True, "entropy_coef": 0.0}
    theirs = trl.outcome(case.numbers, num_generations=GROUP, **settings)
    left = 1 - float(case.batch["truncated"].double().mean())
    assert 0 < left < 1
    assert_equal(Outcome(*(left * x for x in case.ours(**policy))), theirs)


@pytest.mark.parametrize("name", ["grpo-kl", "gspo-token-mean", "cispo-kl"])
def test_trl_weighs_the_divergence_with_the_ratio_unless_told_not_to(trl: Trl, name: str) -> None:
    """DeepSeek-V3.2 (arXiv 2512.02556): k3 times the differentiable ratio. GRPO's own term is without it."""
    base, keys, settings, batch = PRESETS[name]
    case = Case(**batch)
    ours = case.ours(**{**preset(base), **keys})
    result = trl.outcome(case.numbers, num_generations=GROUP, **settings)
    settings = {key: value for key, value in settings.items() if key != "use_bias_correction_kl"}
    untold = trl.outcome(case.numbers, num_generations=GROUP, **settings)
    assert_equal(ours, result)
    assert_different(ours, untold)


def test_trls_rloo_counts_masked_responses_with_a_ratio_of_one(trl: Trl) -> None:
    """There they add a constant, minus their advantage, besides shrinking the mean as above."""
    case = Case(spread=0.2, truncated=0.4)
    settings: dict[str, Any] = {"num_generations": GROUP, "mask_truncated_completions": True, "beta": 0.0}
    theirs = trl.outcome(case.numbers, "rloo", **settings)
    ours = case.ours(**{**preset("rloo"), "overlong": "mask"})
    truncated = case.batch["truncated"].squeeze(-1)
    left = 1 - float(truncated.double().mean())
    torch.testing.assert_close(left * ours.gradient, theirs.gradient, **TOLERANCE)
    advantage = group_advantage(case.batch["next", "reward"].squeeze(-1), "none", 0.0, leave_one_out=True)
    constant = -(advantage * truncated).mean()
    torch.testing.assert_close(left * ours.value + constant, theirs.value, **TOLERANCE)
    assert constant.abs() > 1e-3


def test_trls_bound_of_cispo_is_the_bound_itself(trl: Trl) -> None:
    """``epsilon_high`` is the largest ratio there, and how far it may be above 1 in the paper and here."""
    case = Case(spread=1.5)
    settings: dict[str, Any] = {"num_generations": GROUP, "loss_type": "cispo"}
    five, four = (trl.outcome(case.numbers, epsilon_high=high, **settings) for high in (5.0, 4.0))
    ours = case.ours(**preset("cispo"))
    assert preset("cispo")["clip_epsilon_high"] == 4.0
    assert_equal(ours, five)
    assert_different(ours, four)
    # Nor is there a lower bound, whatever the setting.
    assert_equal(ours, trl.outcome(case.numbers, epsilon_high=5.0, epsilon=0.1, **settings))
    assert_different(case.ours(**{**preset("cispo"), "clip_epsilon": 0.1}), five)


def test_trls_delta_below_the_upper_bound_cuts_good_responses_too(trl: Trl) -> None:
    """Dual-clip PPO bounds the objective of negative advantages only, which is what ours does."""
    case = Case(spread=1.0)
    keys = {"clip_epsilon_high": 0.9, "dual_clip": 1.2}
    theirs = trl.outcome(case.numbers, num_generations=GROUP, loss_type="dapo", epsilon_high=0.9, delta=1.2)
    ours = case.ours(**{**preset("grpo"), **keys})
    advantage, numbers = case.advantage.flatten()[:, None], case.numbers
    ratio = (numbers.log_probs - numbers.trainer).exp().detach()
    between = numbers.mask & (ratio > 1.2) & (ratio < 1.9)
    differs = (ours.gradient - theirs.gradient).abs() > 1e-9
    assert differs.any()
    # A good response keeps its gradient here; a bad one loses it here and keeps it there.
    assert torch.equal(differs, between)
    assert torch.equal(between & (ours.gradient != 0), between & (advantage > 0))
    assert torch.equal(between & (theirs.gradient != 0), between & (advantage < 0))


@pytest.mark.parametrize("level,mode", [("token", "token_truncate"), ("trajectory", "sequence_truncate")])
def test_trls_truncation_also_raises_small_weights(trl: Trl, level: str, mode: str) -> None:
    """With ``clip_min``. Truncated importance sampling has a cap only; our floor is of ``mask``."""
    case = Case(engine=0.4)
    correction = {"proximal": "trainer", "correction": "truncate", "correction_level": level}
    ours = case.ours(**{**preset("grpo"), **correction, "correction_cap": 1.3, "correction_floor": 0.9})
    cap, both = (
        trl.outcome(
            case.numbers,
            num_generations=GROUP,
            loss_type="dapo",
            use_vllm=True,
            vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_max=1.3,
            vllm_importance_sampling_clip_min=low,
        )
        for low in (None, 0.9)
    )
    assert_equal(ours, cap)
    assert_different(ours, both)


def test_trls_ratios_overflow(trl: Trl) -> None:
    """A single log-probability far off makes TRL's loss infinite; ours is bounded at e^20."""
    case = Case()
    mask = case.batch["masks", "response"]
    case.log_probs = torch.where(mask, case.log_probs + 1000.0, case.log_probs)
    theirs = trl.outcome(case.numbers, num_generations=GROUP, loss_type="dapo")
    ours = case.ours(**preset("grpo"))
    assert not torch.isfinite(theirs.value)
    assert torch.isfinite(ours.value) and torch.isfinite(ours.gradient).all()


def test_trl_leaves_rounding_in_groups_of_equal_rewards(trl: Trl) -> None:
    """The mean of equal float32 can differ from them in the last bit; ours is exactly 0."""
    torch.set_default_dtype(torch.float32)
    case = Case(group=8)
    equal = torch.full_like(case.batch["next", "reward"], 0.3)
    case.batch["next", "reward"] = case.batch["next", "reward_parts"] = equal
    theirs = trl.outcome(case.numbers, num_generations=8, loss_type="dapo")
    ours = case.ours(**preset("grpo"))
    assert not ours.gradient.any()
    assert 0 < theirs.gradient.abs().max() < 1e-3


def test_trl_normalizes_rloo_by_the_spread_of_advantages(trl: Trl) -> None:
    """``normalize_advantages``; ``policy.advantage_std=batch`` is the spread of rewards, as in GRPO."""
    case = Case(spread=0.2)
    theirs = trl.outcome(case.numbers, "rloo", num_generations=GROUP, beta=0.0, normalize_advantages=True)
    ours = case.ours(**{**preset("rloo"), "advantage_std": "batch"})
    assert_different(ours, theirs)
    rewards = case.batch["next", "reward"].squeeze(-1)
    advantage = group_advantage(rewards, "none", 0.0, leave_one_out=True)
    factor = (rewards.std() + 1e-4) / (advantage.std() + 1e-4)
    torch.testing.assert_close(factor * ours.gradient, theirs.gradient, **TOLERANCE)


def test_trls_divergence_in_the_reward_is_the_trainers(trl: Trl) -> None:
    """Ours is of the policy that sampled, of which k1 over its samples is an unbiased estimate."""
    case = Case(spread=0.2, engine=0.4)
    theirs = trl.outcome(case.numbers, "rloo", num_generations=GROUP, beta=0.1)
    policy = {**preset("rloo"), "kl_coef": 0.1, "proximal": "trainer"}
    assert_different(case.ours(**policy), theirs)
    # That is all: where trainer and engine agree, so do we.
    case.batch["log_probs", "response"] = case.batch["log_probs", "proximal"]
    assert_equal(case.ours(**policy), theirs)


def test_the_entropy_coefficient_follows_trls_after_the_first_step(trl: Trl) -> None:
    """TRL's first step has no bonus, having measured nothing; ours starts at ``policy.entropy_coef``."""
    case = Case()
    numbers = case.numbers
    trainer = trl.trainer(
        numbers,
        num_generations=GROUP,
        use_adaptive_entropy=True,
        entropy_target=0.3,
        entropy_coef=0.004,
        entropy_coef_delta=0.003,
        entropy_coef_max=0.008,
    )
    scored = trainer._generate_and_score_completions([{"prompt": "x"}] * len(numbers.rewards))
    ours = EntropyCoefficient(0.004, 0.3, 0.003, 0.008)
    coefficients, expected = [], []
    for entropy in (0.2, 0.1, 0.1, 0.5, 0.5, 0.5, 0.5, 0.2, 0.25, 0.1):
        numbers.entropy = torch.full_like(numbers.entropy, entropy).requires_grad_()
        trainer._compute_loss(trainer.model, scored).backward()
        assert numbers.entropy.grad is not None
        expected.append(-float(numbers.entropy.grad.sum()))
        coefficients.append(ours.value)
        ours.update(entropy)
    assert (coefficients[0], expected[0]) == (0.004, 0.0)
    assert coefficients[1:] == pytest.approx(expected[1:], rel=1e-9)
    assert (
        len({round(x, 6) for x in coefficients}) >= 4 and 0.0 in coefficients and max(coefficients) == 0.008
    )


BOUNDS: dict[str, Any] = {"clip_epsilon": 0.2, "clip_epsilon_high": 0.28}
AGGREGATIONS = {"token_mean": "token", "prompt_mean": "sequence"}


def torchrl_outcome(
    case: Case, kind: str, pieces: int = 1, kept: Tensor | None = None, **settings: Any
) -> Outcome:
    """TorchRL's loss of an optimizer step with our advantages: the mean over micro-batches.

    ``kept`` ``[P, G, 1]`` masks the other responses.
    """
    numbers, value = case.numbers, torch.zeros(())
    if kept is not None:
        numbers.mask = numbers.mask & kept.flatten(0, 1)
    for rows in torch.arange(len(numbers.rewards)).chunk(pieces):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        terms = torchrl_terms(numbers, case.advantage, kind, part, clip_epsilon=(0.2, 0.28), **settings)
        losses = [term.sum() for name, term in terms.to_tensordict().items() if name.startswith("loss_")]
        total = torch.stack(losses).sum()
        (total / pieces).backward()
        value += total.detach() / pieces
    return gradients_of(value, numbers.log_probs, numbers.entropy)


@pytest.mark.parametrize("kind", ["GRPOLoss", "DAPO"])
@pytest.mark.parametrize("theirs,ours", AGGREGATIONS.items())
@pytest.mark.parametrize("pieces", [1, 4])
def test_without_padding_our_loss_is_torchrls(kind: str, theirs: str, ours: str, pieces: int) -> None:
    case = Case(ragged=False)
    settings: dict[str, Any] = {"kl_to_ref_coeff": 0.1, "kl_to_inference_coeff": 0.05, "entropy_coeff": 0.01}
    keys = {"kl_coef": 0.1, "kl_inference_coef": 0.05, "entropy_coef": 0.01, "aggregation": ours, **BOUNDS}
    assert_equal(case.ours(**keys), torchrl_outcome(case, kind, pieces, aggregation=theirs, **settings))


@pytest.mark.parametrize("theirs,ours", AGGREGATIONS.items())
def test_with_padding_our_surrogate_is_torchrls(theirs: str, ours: str) -> None:
    case = Case()
    outcome, terms = case.terms(aggregation=ours, **BOUNDS)
    assert_equal(outcome, torchrl_outcome(case, "GRPOLoss", aggregation=theirs, entropy_bonus=False))
    assert 0 < float(terms["clip_fraction"]) < 1


def test_torchrls_loss_by_token_is_our_numerator() -> None:
    case = Case()
    theirs = torchrl_outcome(case, "GRPOLoss", aggregation="none", entropy_bonus=False)
    tokens = int(case.batch["masks", "response"].sum())
    assert_equal(case.ours(**BOUNDS), Outcome(*(x / tokens for x in theirs)))


def test_torchrls_means_are_by_micro_batch() -> None:
    """So a token of a micro-batch of short responses weighs more than another; ours weigh the same."""
    case = Case()
    cut = torchrl_outcome(case, "GRPOLoss", 4, entropy_bonus=False)
    assert_different(case.ours(4, **BOUNDS), cut)
    by_piece, _ = case.terms(4, own_totals=True, **BOUNDS)
    assert_equal(Outcome(*(x / 4 for x in by_piece)), cut)


def test_torchrl_counts_padding_in_its_divergences_and_metrics() -> None:
    """They shrink with the share of padding; our means are over the tokens that are there."""
    case = Case()
    numbers = case.numbers
    settings: dict[str, Any] = {"kl_to_ref_coeff": 0.1, "kl_to_inference_coeff": 0.05}
    terms = torchrl_terms(numbers, case.advantage, "GRPOLoss", clip_epsilon=(0.2, 0.28), **settings)
    (terms.loss_kl_to_ref + terms.loss_kl_to_inference).backward()
    theirs = gradients_of(
        terms.loss_kl_to_ref + terms.loss_kl_to_inference, numbers.log_probs, numbers.entropy
    )
    both, ours = case.terms(kl_coef=0.1, kl_inference_coef=0.05, **BOUNDS)
    without = case.ours(**BOUNDS)
    mask = numbers.mask
    share = float(mask.double().mean())
    assert 0 < share < 0.9
    assert_equal(Outcome(*(share * (a - b) for a, b in zip(both, without, strict=True))), theirs)
    torch.testing.assert_close(terms.kl_to_ref, share * ours["kl_ref"], **TOLERANCE)
    gap = (numbers.trainer - numbers.log_probs).detach()
    torch.testing.assert_close(terms.kl_approx, (gap * mask).mean(), **TOLERANCE)
    torch.testing.assert_close(terms.entropy, numbers.entropy.detach().mean(), **TOLERANCE)
    torch.testing.assert_close(ours["entropy"], numbers.entropy[mask].detach().mean(), **TOLERANCE)


def test_torchrl_counts_masked_responses_in_the_mean_over_responses() -> None:
    """As TRL does."""
    case = Case(truncated=0.4)
    ours = case.ours(aggregation="sequence", overlong="mask", **BOUNDS)
    kept = ~case.batch["truncated"]
    theirs = torchrl_outcome(case, "GRPOLoss", kept=kept, aggregation="prompt_mean", entropy_bonus=False)
    left = float(kept.double().mean())
    assert 0 < left < 1
    assert_equal(Outcome(*(left * x for x in ours)), theirs)


def test_torchrls_entropy_is_aggregated_as_the_surrogate_is() -> None:
    """Ours is a mean over tokens with any aggregation, so that its coefficient keeps its meaning."""
    case = Case()
    settings: dict[str, Any] = {"aggregation": "prompt_mean", "entropy_coeff": 0.1}
    theirs = torchrl_outcome(case, "GRPOLoss", **settings).entropy_gradient
    mask = case.numbers.mask
    lengths = mask.sum(-1, keepdim=True)
    torch.testing.assert_close(theirs, -0.1 * mask / (lengths * len(mask)), **TOLERANCE)
    ours = case.ours(aggregation="sequence", entropy_coef=0.1, **BOUNDS).entropy_gradient
    torch.testing.assert_close(ours, -0.1 * mask / mask.sum(), **TOLERANCE)


def test_torchrls_cispo_gives_cut_tokens_no_gradient() -> None:
    """It differentiates the cut ratio; the paper's, and ours, is a constant times the log-probability.

    That every token keeps its gradient is what CISPO is for.
    """
    case = Case()
    theirs = torchrl_outcome(case, "CISPOLoss", entropy_bonus=False).gradient
    ours = case.ours(surrogate="cispo", **BOUNDS).gradient
    numbers = case.numbers
    ratio = (numbers.log_probs - numbers.trainer).exp().detach()
    cut = numbers.mask & ((ratio < 0.8) | (ratio > 1.28))
    assert 0 < cut.sum() < numbers.mask.sum()
    torch.testing.assert_close(ours[~cut], theirs[~cut], **TOLERANCE)
    assert not theirs[cut].any() and (ours[cut] != 0).all()


def test_group_advantages_are_torchrls_without_an_epsilon() -> None:
    """TorchRL keeps the spread from falling below 1e-6 where ours, as TRL's, adds to it."""
    from torchrl.objectives.llm import MCAdvantage  # which imports vLLM

    rewards = torch.randn(3, GROUP, generator=torch.Generator().manual_seed(0))
    transform = MCAdvantage(grpo_size=GROUP, prompt_key="group", trajectory_return="sum")
    parts = []
    for group, row in enumerate(rewards):
        for reward in row:
            data = {
                "group": torch.tensor([group]),
                "reward": reward.view(1, 1),
                "done": torch.ones(1, 1).bool(),
            }
            step = TensorDict({"group": data.pop("group"), "next": TensorDict(data, [1])}, [1])
            written = transform.inv(step)
        parts.append(written["advantage"].flatten())
    theirs = torch.stack(parts)
    torch.testing.assert_close(group_advantage(rewards, "unbiased", 0.0), theirs, **TOLERANCE)
    assert not torch.allclose(group_advantage(rewards, "unbiased", 1e-4), theirs, rtol=1e-9)
