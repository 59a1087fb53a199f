"""Batches of groups, the buffer that hands them out, and what is computed on the way in."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from batches import PAD, make_batch, make_model, make_objective, no_budget
from rounding import EXACT
from tensordict import TensorDict, TensorDictBase
from torchrl.envs.transforms import Transform

from torchrl_grpo.batch.micro_batches import TokenBudget
from torchrl_grpo.batch.schema import build_batch, collate
from torchrl_grpo.inference import Completion
from torchrl_grpo.models.scoring.padding import pad_left, pad_right
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.objectives.advantage import group_advantage
from torchrl_grpo.rollout.buffer import GroupBuffer
from torchrl_grpo.rollout.log_prob_transform import LogProbScorer


def test_padding_goes_by_length_and_not_by_token() -> None:
    rows = [[PAD, 5, PAD], [7]]
    ids, mask = pad_left(rows, PAD)
    assert ids.tolist() == [[PAD, 5, PAD], [PAD, PAD, 7]] and ids.dtype == torch.int64
    assert mask.tolist() == [[True] * 3, [False, False, True]]
    values, mask = pad_right([[1.5, 2.5], [3.5]], 0.0, torch.float32)
    assert values.tolist() == [[1.5, 2.5], [3.5, 0.0]] and values.dtype == torch.float32
    assert mask.tolist() == [[True, True], [True, False]]


def completion(ids: list[int], reason: str = "stop") -> Completion:
    return Completion(ids, [-0.5 * (i + 1) for i in range(len(ids))], reason)


def test_build_batch_writes_the_schema() -> None:
    round_ = build_batch(
        [[1, PAD, 3], [4]],
        [[completion([5, PAD]), completion([6], "length")], [completion([PAD]), completion([7, 8, PAD])]],
        torch.arange(4.0).view(2, 2, 1),
        torch.arange(8.0).view(2, 2, 2),
        torch.tensor([[8, 8], [9, 9]]),
        versions=3,
        pad_token_id=PAD,
    )
    assert round_.batch_size == (2,)
    # Each group is as wide as its own longest response, and prompts have no padding.
    assert [group["tokens", "prompt"].tolist() for group in round_] == [[1, PAD, 3], [4]]
    assert round_[0]["tokens", "response"].tolist() == [[5, PAD], [6, PAD]]
    assert round_["truncated"].squeeze(-1).tolist() == [[False, True], [False, False]]
    groups = collate(round_.unbind(0))
    assert groups["tokens", "prompt"].tolist() == [[1, PAD, 3], [0, 0, 4]]
    assert groups["masks", "prompt"].tolist() == [[True] * 3, [False, False, True]]
    assert groups["tokens", "response"][1].tolist() == [[PAD] * 3, [7, 8, PAD]]
    assert groups["versions", "response"][0].tolist() == [[3, 3, 0], [3, 0, 0]]
    # The end token counts although it is also the pad token.
    assert groups["masks", "response"].sum(-1).tolist() == [[2, 1], [1, 3]]
    assert groups["log_probs", "response"][0].tolist() == [[-0.5, -1.0, 0.0], [-0.5, 0.0, 0.0]]
    assert groups["log_probs", "response"].dtype == torch.float32
    assert groups["truncated"].squeeze(-1).tolist() == [[False, True], [False, False]]
    assert groups["policy_version"].tolist() == groups["newest_policy_version"].tolist() == [[3, 3], [3, 3]]
    assert groups["next", "reward"].shape == (2, 2, 1)
    assert groups["next", "reward_parts"][1].tolist() == [[4, 5], [6, 7]]
    assert groups["group_id"].tolist() == [[8, 8], [9, 9]]


@pytest.mark.parametrize(
    ("versions", "sampled"),
    [
        ([[3, 3], [], [4]], [[True, True], [], [False]]),
        ([[4, 3, 5], [], [4]], [[True, False, True], [], [True]]),
        ([[], [], []], [[], [], []]),
    ],
    ids=["one value each", "several values", "no tokens"],
)
def test_each_token_has_its_version_and_whether_it_was_sampled(
    versions: list[list[int]], sampled: list[list[bool]]
) -> None:
    rows = zip(versions, sampled, strict=True)
    responses = [Completion([5] * len(row), [-0.5] * len(row), "stop", own or None) for row, own in rows]
    (group,) = build_batch(
        [[1]], [responses], torch.zeros(1, 3, 1), torch.zeros(1, 3, 1), torch.zeros(1, 3), [versions], PAD
    ).unbind(0)
    width = max(map(len, versions))
    assert group["versions", "response"].tolist() == [row + [0] * (width - len(row)) for row in versions]
    assert group["masks", "sampled"].tolist() == [row + [False] * (width - len(row)) for row in sampled]
    assert group["masks", "sampled"].dtype == torch.bool
    most = torch.iinfo(torch.int64).max
    assert group["policy_version"].tolist() == [min(row, default=most) for row in versions]
    assert group["newest_policy_version"].tolist() == [max(row, default=0) for row in versions]


def test_collate_stacks_groups_of_different_widths_and_no_wider_than_needed() -> None:
    short, long = make_batch(P=3, L=3, T=9, seed=1), make_batch(P=3, L=8, T=2, seed=2)
    groups = [*short.unbind(0), *long.unbind(0)]
    batch = collate(groups)
    assert batch["tokens", "prompt"].shape == (6, 8) and batch["tokens", "response"].shape == (6, 4, 9)
    for row, group in zip(batch.unbind(0), groups, strict=True):
        for kind, keys in (("prompt", ["tokens"]), ("response", ["tokens", "log_probs"])):
            before, after = group["masks", kind], row["masks", kind]
            assert after.sum() == before.sum()
            for key in keys:
                assert torch.equal(row[key, kind][after], group[key, kind][before])
        assert torch.equal(
            row["log_probs", "reference"][row["masks", "response"]],
            group["log_probs", "reference"][group["masks", "response"]],
        )
        assert torch.equal(row["masks", "prompt"], row["masks", "prompt"].sort().values)
        assert torch.equal(row["advantage"], group["advantage"])
    narrow = collate(groups[3:4])
    assert narrow["tokens", "prompt"].shape[-1] == int(groups[3]["masks", "prompt"].sum())
    assert narrow["tokens", "response"].shape[-1] == int(groups[3]["masks", "response"].sum(-1).max())


def make_buffer(groups_per_batch: int = 2, seed: int = 0, transforms: Any = ()) -> GroupBuffer:
    return GroupBuffer(8, groups_per_batch, transforms, seed)


def epoch(buffer: GroupBuffer, batches: int = 4) -> list[int]:
    return [int(row) for _ in range(batches) for row in buffer.sample()["group_id"][:, 0]]


def test_each_group_exactly_once_an_epoch_and_reshuffled() -> None:
    buffer = make_buffer()
    buffer.replace_contents(make_batch(P=8, G=2))
    orders = [epoch(buffer) for _ in range(6)]
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert len({tuple(order) for order in orders}) > 1


def test_a_group_comes_back_as_it_went_in() -> None:
    buffer, groups = make_buffer(groups_per_batch=8), make_batch(P=8, G=2)
    buffer.replace_contents(groups)
    sample = buffer.sample()
    for row in sample.unbind(0):
        original = groups[int(row["group_id"][0])]
        mask, kept = row["masks", "response"], original["masks", "response"]
        assert torch.equal(row["tokens", "response"][mask], original["tokens", "response"][kept])
        assert torch.equal(row["log_probs", "response"][mask], original["log_probs", "response"][kept])
        assert torch.equal(row["advantage"], original["advantage"])
    assert buffer.contents()["group_id"][:, 0].tolist() == list(range(8))


def test_refill_replaces_even_in_the_middle_of_an_epoch() -> None:
    buffer = make_buffer()
    first, second = make_batch(P=8, G=2), make_batch(P=8, G=2, seed=1)
    second["group_id"] += 100
    buffer.replace_contents(first)
    epoch(buffer, batches=1)
    buffer.replace_contents(second)
    assert sorted(epoch(buffer)) == list(range(100, 108))


def test_rounds_of_different_size_and_width() -> None:
    buffer = make_buffer()
    buffer.replace_contents(make_batch(P=8, G=2, L=3, T=3))
    epoch(buffer)
    buffer.replace_contents(make_batch(P=4, G=2, L=9, T=12))
    assert sorted(epoch(buffer, batches=2)) == list(range(4))
    assert buffer.contents()["tokens", "response"].shape == (4, 2, 12)


def test_the_order_depends_on_the_seed_and_on_nothing_else() -> None:
    orders = []
    for seed in (0, 0, 1):
        torch.rand(3)
        buffer = make_buffer(seed=seed)
        buffer.replace_contents(make_batch(P=8, G=2))
        before = torch.get_rng_state()
        orders.append(epoch(buffer) + epoch(buffer))
        assert torch.equal(torch.get_rng_state(), before)
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize("sampled", [0, 1, 3, 4, 5])
def test_the_state_goes_through_a_file_and_continues_with_the_same_samples(sampled: int) -> None:
    buffer = make_buffer(transforms=[CountingTransform()])
    buffer.replace_contents(make_batch(P=8, G=2))
    epoch(buffer, sampled)
    file = io.BytesIO()
    torch.save(buffer.state_dict(), file)
    file.seek(0)
    counting = CountingTransform()
    resumed = make_buffer(seed=99, transforms=[counting])
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for _ in range(9):
        expected, restored = buffer.sample(), resumed.sample()
        assert set(expected.keys(True, True)) == set(restored.keys(True, True))
        for key in expected.keys(True, True):
            assert torch.equal(expected[key], restored[key]), key
    assert counting.calls == 0, "the write transforms ran a second time"
    assert torch.equal(resumed.contents()["advantage"], buffer.contents()["advantage"])
    # And the next round's order as well.
    for storage in (buffer, resumed):
        storage.replace_contents(make_batch(P=8, G=2))
    assert epoch(buffer) == epoch(resumed)


def test_an_empty_buffer_has_a_state_too() -> None:
    buffer, resumed = make_buffer(), make_buffer(seed=5)
    resumed.load_state_dict(buffer.state_dict())
    for storage in (buffer, resumed):
        storage.replace_contents(make_batch(P=8, G=2))
    assert epoch(buffer) == epoch(resumed)


class CountingTransform(Transform):
    """Counts its calls on the write side."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.calls += 1
        return tensordict


@pytest.mark.usefixtures("float64")
def test_write_transforms_run_in_the_order_given_once_a_round() -> None:
    model = make_model()
    scorer, groups = TokenScorer(model), make_batch(P=8, G=3, kl=False)
    counting = CountingTransform()
    _, advantage = make_objective(scorer, kl_coef=0.3, kl_in="reward", kl_estimator="k1")
    buffer = GroupBuffer(
        8, 4, [LogProbScorer(scorer, "reference", TokenBudget(40, True, print)), advantage, counting], 0
    )
    buffer.replace_contents(groups)
    with torch.no_grad():
        reference = scorer(*(groups[k] for k in _SCORED)).log_probs
    held = buffer.contents()
    torch.testing.assert_close(held["log_probs", "reference"], reference, **EXACT)
    # The penalty is in the advantage, so the reference was there before it.
    penalty = ((groups["log_probs", "response"] - reference) * groups["masks", "response"]).sum(-1)
    expected = group_advantage(groups["next", "reward"].squeeze(-1) - 0.3 * penalty, "unbiased", 1e-4)
    torch.testing.assert_close(held["advantage"].squeeze(-1), expected, **EXACT)
    without = group_advantage(groups["next", "reward"].squeeze(-1), "unbiased", 1e-4)
    assert float((expected - without).abs().max()) > 0.1
    buffer.sample()
    assert counting.calls == 1
    assert not held["log_probs", "reference"].requires_grad


_SCORED = (("tokens", "prompt"), ("masks", "prompt"), ("tokens", "response"), ("masks", "response"))


@pytest.mark.usefixtures("float64")
def test_a_scorer_writes_its_own_models_log_probabilities_and_nobody_elses() -> None:
    model, groups = make_model(), make_batch(P=3, G=2)
    before = groups["log_probs", "response"].clone()
    scorer = TokenScorer(model, temperature=0.7)
    written = LogProbScorer(scorer, "proximal", no_budget()).inv(groups)
    with torch.no_grad():
        expected = scorer(*(groups[k] for k in _SCORED)).log_probs
    torch.testing.assert_close(written["log_probs", "proximal"], expected, **EXACT)
    assert torch.equal(written["log_probs", "response"], before)
    assert float((expected - before).abs().max()) > 0.1


@pytest.mark.parametrize(("vocabulary", "count"), [(None, 61), (40, 40)])
def test_no_more_candidates_are_written_than_there_are_tokens(vocabulary: int | None, count: int) -> None:
    scorer = LogProbScorer(
        TokenScorer(make_model()), "reference", no_budget(), top_k=66, vocabulary=vocabulary
    )
    written = scorer.inv(make_batch(P=3, G=2))
    assert written["tokens", "candidates"][0, 0, :, 0].sort().values.tolist() == list(range(count))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("share", [0.25, 1.0])
def test_mixing_moves_every_weight_by_its_share(share: float) -> None:
    reference, policy = make_model(seed=0), make_model(seed=1)
    before = [p.detach().clone() for p in reference.parameters()]
    copied = copy.deepcopy(reference)
    others = [(TokenScorer(copied), no_budget())]
    LogProbScorer(TokenScorer(reference), "reference", no_budget(), others=others).interpolate_toward(
        policy, share
    )
    for model in (reference, copied):
        for old, new, other in zip(before, model.parameters(), policy.parameters(), strict=True):
            torch.testing.assert_close(new, (1 - share) * old + share * other, **EXACT)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("copies", [2, 3, 7])
def test_copies_of_a_model_score_a_share_of_the_groups_each(copies: int) -> None:
    groups = make_batch(P=5, G=3, seed=1)
    model = make_model()
    alone = LogProbScorer(TokenScorer(model), "reference", no_budget()).inv(groups.clone())
    rows: dict[int, int] = {}

    class Counting(TokenScorer):
        def forward(self, prompt: torch.Tensor, *rest: Any, **options: Any) -> Any:
            assert not torch.is_grad_enabled()
            rows[id(self)] = rows.get(id(self), 0) + len(prompt)
            return super().forward(prompt, *rest, **options)

    first, *others = ((Counting(copy.deepcopy(model)), TokenBudget(30, True, print)) for _ in range(copies))
    together = LogProbScorer(first[0], "reference", first[1], others=others).inv(groups.clone())
    torch.testing.assert_close(together["log_probs", "reference"], alone["log_probs", "reference"], **EXACT)
    assert len(rows) == min(copies, 5)


def test_the_buffer_does_not_list_the_reference_model() -> None:
    buffer = GroupBuffer(8, 4, [LogProbScorer(TokenScorer(make_model()), "reference", no_budget())], 0)
    assert not list(buffer.buffer._transform.parameters())


def test_the_buffer_samples_whole_groups() -> None:
    buffer = make_buffer(groups_per_batch=3)
    buffer.replace_contents(make_batch(P=6, G=4))
    sample: TensorDict = buffer.sample()
    assert sample.batch_size == (3,)
    assert (sample["group_id"] == sample["group_id"][:, :1]).all()
