"""Micro-batches: packed by real tokens, cut where one group is too many, smaller when memory runs out."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from batches import gradients, make_batch, make_model, make_objective
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import EQUAL, EXACT
from tensordict import TensorDict

from torchrl_grpo.batch.micro_batches import (
    MicroBatch,
    TokenBudget,
    first_fit_decreasing,
    partition_balanced,
    split_evenly,
)
from torchrl_grpo.batch.schema import token_counts
from torchrl_grpo.errors import TrainingStopped
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.objectives.aggregation import count_totals
from torchrl_grpo.rollout.log_prob_transform import LogProbScorer


def pieces_of(batch: TensorDict, budget: TokenBudget, **options: Any) -> list[MicroBatch]:
    return budget.run(batch, lambda micro: micro, lambda: None, **options)


def cost_of(batch: TensorDict, micro: MicroBatch, shares: bool) -> int:
    piece = micro.select(batch)
    prompt, response = piece["masks", "prompt"].sum(-1), piece["masks", "response"].sum(-1)
    return int(response.sum() + (prompt if shares else prompt * response.shape[1]).sum())


@given(st.lists(st.integers(1, 30), max_size=40), st.integers(30, 90))
@settings(max_examples=200, deadline=None)
def test_first_fit_decreasing_keeps_its_promise(costs: list[int], budget: int) -> None:
    bins = first_fit_decreasing(dict(enumerate(costs)), budget)
    assert sorted(itertools.chain(*bins)) == list(range(len(costs)))
    assert all(list(rows) == sorted(rows) for rows in bins)
    loads = [sum(costs[row] for row in rows) for rows in bins]
    assert all(load <= budget for load in loads)
    # Any two bins together are more than one could hold, else the second would not have been opened.
    assert all(a + b > budget for a, b in itertools.combinations(loads, 2))


def test_packing_is_by_hand() -> None:
    assert first_fit_decreasing({0: 4, 1: 8, 2: 1, 3: 4, 4: 2, 5: 1}, 10) == [(1, 4), (0, 2, 3, 5)]


@given(st.lists(st.integers(0, 20), max_size=60), st.integers(20, 50), st.integers(1, 9))
def test_rows_go_where_a_search_of_all_bins_and_shares_puts_them(
    costs: list[int], budget: int, shares: int
) -> None:
    bins: list[list[int]] = []
    loads = [0] * shares
    parts: list[list[int]] = [[] for _ in loads]
    for row in sorted(range(len(costs)), key=lambda row: (-costs[row], row)):
        fits = [rows for rows in bins if sum(costs[other] for other in rows) + costs[row] <= budget]
        if not fits:
            bins.append([])
            fits = bins[-1:]
        fits[0].append(row)
        least = loads.index(min(loads))
        parts[least].append(row)
        loads[least] += costs[row]
    expected = [tuple(sorted(rows)) for rows in bins]
    assert first_fit_decreasing(dict(enumerate(costs)), budget) == expected
    assert partition_balanced(costs, shares) == [sorted(part) for part in parts]


@pytest.mark.slow
@pytest.mark.parametrize("shares", [True, False])
@given(seed=st.integers(0, 1000), tokens=st.integers(14, 120))
@settings(max_examples=60, deadline=None)
def test_every_response_is_in_one_micro_batch_within_the_budget(shares: bool, seed: int, tokens: int) -> None:
    batch = make_batch(P=5, G=4, L=7, T=6, seed=seed)
    budget = TokenBudget(tokens, shares, print)
    pieces = pieces_of(batch, budget)
    seen = torch.zeros(5, 4, dtype=torch.int64)
    for micro in pieces:
        seen[list(micro.rows), micro.samples] += 1
        assert cost_of(batch, micro, shares) <= tokens
        # A group is cut only where it cannot be kept whole.
        if micro.samples != slice(None):
            assert cost_of(batch, MicroBatch(micro.rows, slice(None)), shares) > tokens
    assert (seen == 1).all()


def test_a_micro_batch_is_as_narrow_as_its_tokens() -> None:
    batch = make_batch(P=4, G=3, L=9, T=8)
    prompts, responses = token_counts(batch)
    for rows in ([0], [1, 2], [3]):
        piece = MicroBatch(tuple(rows), slice(None)).select(batch)
        assert piece["tokens", "prompt"].shape[1] == max(prompts[row] for row in rows)
        assert piece["tokens", "response"].shape[2] == max(max(responses[row]) for row in rows)
        for place, row in enumerate(rows):
            for part in ("prompt", "response"):
                own = piece["tokens", part][place][piece["masks", part][place]]
                assert torch.equal(own, batch["tokens", part][row][batch["masks", part][row]])


def test_equal_pieces_are_cut_further_by_the_budget() -> None:
    batch = make_batch(P=4, G=4)
    halves = split_evenly(4, 4, 2, 4)
    assert [piece.rows for piece in pieces_of(batch, TokenBudget(10**6, True, print), pieces=halves)] == [
        (0, 1),
        (2, 3),
    ]
    tight = pieces_of(batch, TokenBudget(20, True, print), pieces=halves)
    assert len(tight) > 2 and all(set(m.rows) <= {0, 1} or set(m.rows) <= {2, 3} for m in tight)


def test_a_sequence_over_the_budget_is_an_error_that_says_how_many_tokens_it_has() -> None:
    batch = make_batch(P=1, G=2, L=7, T=6)
    batch["masks", "prompt"][:] = True
    batch["masks", "response"][:] = True
    with pytest.raises(
        TrainingStopped,
        match=r"max_tokens_per_microbatch=12: a sequence has 13 tokens, 7 of .* prompt and 6 .* response; "
        r"write train.max_tokens_per_microbatch=13",
    ):
        pieces_of(batch, TokenBudget(12, True, print))
    assert len(pieces_of(batch, TokenBudget(13, True, print))) == 2


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("tokens", [15, 30, 60])
def test_the_budget_changes_no_gradient(tokens: int) -> None:
    batch, model = make_batch(P=4, G=4), make_model()
    loss, advantage = make_objective(TokenScorer(model), kl_coef=0.1, entropy_coef=0.01)
    batch = advantage.inv(batch)
    totals, results = count_totals(batch["masks", "loss"]), []
    for budget in (10**6, tokens):
        model.zero_grad()

        def backward(micro: MicroBatch) -> float:
            terms = loss(micro.select(batch), totals=totals)
            total = sum(value for name, value in terms.items() if name.startswith("loss_"))
            total.backward()
            return float(total.detach())

        values = TokenBudget(budget, True, print).run(batch, backward, lambda: None)
        results.append((sum(values), len(values), gradients(model)))
    (whole, whole_count, expected), (summed, micro_count, gradient) = results
    assert whole_count == 1 and micro_count > 1
    assert summed == pytest.approx(whole, **EQUAL)
    for name in expected:
        torch.testing.assert_close(gradient[name], expected[name], **EXACT)


class Memory:
    """Holds ``limit`` tokens; more is what torch says when an allocation fails."""

    def __init__(self, batch: TensorDict, limit: int, message: str) -> None:
        self.batch, self.limit, self.message = batch, limit, message
        self.done: list[MicroBatch] = []
        self.undone = 0

    def work(self, micro: MicroBatch) -> int:
        if cost_of(self.batch, micro, True) > self.limit:
            raise RuntimeError(self.message)
        self.done.append(micro)
        return 1

    def undo(self) -> None:
        self.done.clear()
        self.undone += 1


CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"
CPU = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
GPU = "CUDA out of memory. Tried to allocate 2.00 GiB"


@pytest.mark.parametrize("message", [CPU, GPU, CUBLAS])
def test_the_budget_halves_until_memory_holds_and_stays_there(message: str) -> None:
    batch = make_batch(P=8, G=4)
    messages: list[str] = []
    budget = TokenBudget(10_000, True, messages.append)
    memory = Memory(batch, 40, message)
    assert sum(budget.run(batch, memory.work, memory.undo)) == len(memory.done)
    covered = torch.zeros(8, 4)
    for micro in memory.done:
        covered[list(micro.rows), micro.samples] += 1
    # Nothing is counted twice, although earlier attempts had begun.
    assert (covered == 1).all()
    assert memory.undone == len(messages) > 0
    assert "the step is run again" in messages[0] and "train.max_tokens_per_microbatch" in messages[0]
    tokens = budget.tokens
    assert 1 <= tokens <= 40
    budget.run(batch, memory.work, memory.undo)
    assert budget.tokens == tokens and memory.undone == len(messages)
    other = TokenBudget(10_000, True, print)
    other.load_state_dict(budget.state_dict())
    assert other.tokens == tokens
    # Whoever asks for another budget when resuming gets it.
    changed = TokenBudget(5_000, True, print)
    changed.load_state_dict(budget.state_dict())
    assert changed.tokens == 5_000


def test_a_budget_that_memory_lowered_still_takes_longer_sequences_alone() -> None:
    short, long = make_batch(P=4, G=2, L=3, T=3), make_batch(P=2, G=2, L=9, T=8)
    budget = TokenBudget(1000, True, lambda text: None)
    memory = Memory(short, 7, GPU)
    budget.run(short, memory.work, memory.undo)
    assert budget.tokens <= 7
    pieces = pieces_of(long, budget)
    costs = [cost_of(long, micro, True) for micro in pieces]
    assert max(costs) > budget.tokens
    alone = [m for m, cost in zip(pieces, costs, strict=True) if cost > budget.tokens]
    assert all(len(range(2)[micro.samples]) == 1 == len(micro.rows) for micro in alone)


def test_when_a_single_sequence_does_not_fit_the_run_stops_and_says_what_would() -> None:
    batch = make_batch(P=2, G=3)
    memory = Memory(batch, 3, GPU)
    with pytest.raises(
        TrainingStopped, match=r"a single sequence of \d+ tokens: lower inference_model.max_new_tokens"
    ):
        TokenBudget(10_000, True, lambda text: None).run(batch, memory.work, memory.undo)


def test_another_error_is_not_taken_for_a_lack_of_memory() -> None:
    batch = make_batch(P=2, G=3)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        TokenBudget(10_000, True, print).run(
            batch, lambda micro: (_ for _ in ()).throw(RuntimeError("shape mismatch")), lambda: None
        )


@pytest.mark.usefixtures("float64")
def test_scores_come_out_in_their_own_places() -> None:
    batch, scorer = make_batch(P=6, G=4, kl=False), TokenScorer(make_model())
    whole = LogProbScorer(scorer, "reference", TokenBudget(10**6, True, print)).inv(batch.clone())
    pieces = LogProbScorer(scorer, "reference", TokenBudget(16, True, print)).inv(batch.clone())
    expected = whole["log_probs", "reference"]
    torch.testing.assert_close(pieces["log_probs", "reference"], expected, **EXACT)
    assert expected[batch["masks", "response"]].lt(0).all()
