"""Rounds whose groups have widths of their own: they train like padded ones, in little more memory."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from batches import (
    assert_same_groups,
    gradients,
    make_batch,
    make_model,
    make_objective,
    ragged,
    size_in_bytes,
)
from rounding import EQUAL, EXACT
from tensordict import TensorDictBase

from torchrl_grpo.batch.micro_batches import TokenBudget
from torchrl_grpo.batch.schema import collate, pack, unpack
from torchrl_grpo.config.schema import OptimizerConfig
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.rewards.types import ResponseScore
from torchrl_grpo.rollout.buffer import GroupBuffer
from torchrl_grpo.rollout.groups import Group, Response, ScoredGroup
from torchrl_grpo.rollout.log_prob_transform import LogProbScorer
from torchrl_grpo.rollout.round import build_round
from torchrl_grpo.training.optimizer_step import OptimizerStep

POLICIES: dict[str, dict[str, Any]] = {
    "loss": {"kl_coef": 0.1, "entropy_coef": 0.01, "overlong": "mask"},
    "reward": {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1", "overlong": "penalise"},
    "maxent": {
        "advantage_estimator": "maxent",
        "kl_in": "weights",
        "kl_coef": 0.1,
        "length_normalize_ref": True,
    },
}


def round_of(lengths: list[list[int]]) -> TensorDictBase:
    """The groups of a round with responses of these lengths."""
    groups = [
        Group(number, [1] * 4, number, [Response([5] * n, [-0.5] * n, [3] * n, "stop") for n in row])
        for number, row in enumerate(lengths)
    ]
    scores = [ResponseScore(1.0, {"r": 1.0})] * len(lengths[0])
    scored = [ScoredGroup(group, [""] * len(scores), scores) for group in groups]
    return build_round(scored, [""] * len(groups), reward_names=["r"], pad_token_id=0, seconds={}).groups


def test_one_long_response_makes_no_other_group_longer() -> None:
    even, uneven = [[10] * 16 for _ in range(32)], [[10] * 16 for _ in range(32)]
    uneven[3][5] = 100
    bytes_per_token = size_in_bytes(round_of(even)) / sum(map(sum, even))
    tokens = sum(map(sum, uneven))
    assert size_in_bytes(round_of(uneven)) < 1.3 * tokens * bytes_per_token


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("budget", [10**6, 30])
def test_a_round_of_ragged_groups_trains_like_a_padded_one(policy: str, budget: int) -> None:
    batch = make_batch(P=5, G=3, L=9, T=12, seed=2, kl=False)
    batch["truncated"][0, 0] = True
    results = []
    for groups in (batch, ragged(batch)):
        model = make_model()
        scorer = TokenScorer(model)
        loss, advantage = make_objective(scorer, max_new_tokens=12, **POLICIES[policy])
        reference = LogProbScorer(TokenScorer(make_model(seed=1)), "reference", TokenBudget(30, True, print))
        buffer = GroupBuffer(5, 5, [reference, advantage], 0)
        buffer.replace_contents(groups)
        step = OptimizerStep(
            model,
            loss,
            OptimizerConfig(),
            total_steps=1,
            groups_per_batch=5,
            num_pieces=1,
            budget=TokenBudget(budget, True, print),
            use_scaler=False,
            max_skipped_steps=0,
        )
        shares, totals = step.divide(buffer.sample())
        results.append((buffer.contents(), step.accumulate(shares[0], totals), gradients(model)))
    (padded, expected, by_name), (own, sums, ragged_by_name) = results
    widths = {group["tokens", "response"].shape[-1] for group in own}
    assert len(widths) > 1
    torch.testing.assert_close(own["advantage"], padded["advantage"], **EXACT)
    assert sums == pytest.approx(expected, **EQUAL)
    assert any(gradient.any() for gradient in by_name.values())
    for name, gradient in by_name.items():
        torch.testing.assert_close(ragged_by_name[name], gradient, **EXACT)


@pytest.mark.usefixtures("float64")
def test_candidates_of_a_teacher_stand_at_the_tokens_of_their_group() -> None:
    batch = make_batch(P=4, G=3, T=12, kl=False)
    teacher = LogProbScorer(TokenScorer(make_model()), "reference", TokenBudget(20, True, print), top_k=3)
    padded, own = teacher.inv(batch), teacher.inv(ragged(batch))
    together = collate(own.unbind(0))
    assert together["tokens", "candidates"].shape == padded["tokens", "candidates"].shape
    assert torch.equal(together["tokens", "candidates"], padded["tokens", "candidates"])
    for name in ("reference", "candidates"):
        torch.testing.assert_close(together["log_probs", name], padded["log_probs", name], **EXACT)


def test_the_loss_pads_the_groups_of_a_round() -> None:
    loss, advantage = make_objective(TokenScorer(make_model()))
    groups = advantage.inv(ragged(make_batch(kl=False)))
    for name, value in loss(collate(groups.unbind(0))).items():
        assert torch.equal(loss(groups)[name], value), name


def test_groups_are_packed_into_few_tensors_and_come_back() -> None:
    groups = ragged(make_batch(P=6, T=12))
    packed = pack(groups)
    assert len(packed) == len(list(groups[0].keys(True, True)))
    assert_same_groups(unpack(packed), groups)


@pytest.mark.parametrize("is_old", [False, True])
def test_a_buffer_goes_on_from_a_checkpoint(is_old: bool) -> None:
    def make(seed: int) -> GroupBuffer:
        return GroupBuffer(6, 2, [], seed)

    buffer, resumed = make(0), make(1)
    buffer.replace_contents(ragged(make_batch(P=6, T=12)))
    buffer.sample()
    state = buffer.state_dict()
    if is_old:
        # Groups of one round had one width, and an entry each.
        padded = collate(buffer.contents().unbind(0))
        state["groups"] = [dict(group.flatten_keys("/").items()) for group in padded.unbind(0)]
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for _ in range(5):
        expected, sample = (collate(each.sample().unbind(0)) for each in (buffer, resumed))
        assert_same_groups(sample, expected)
