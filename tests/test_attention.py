"""Attention as matrix products: a float64 loop has the same results and gradients; where it is taken."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from torchrl_grpo.models import attention, shared_prefix

HEADS, KEY_HEADS, D, E = 6, 2, 8, 4


def by_hand(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scaling: float) -> Tensor:
    """One query at a time, over the keys that it sees and no others."""
    rows = []
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            k, v = key[b, h // (HEADS // KEY_HEADS)], value[b, h // (HEADS // KEY_HEADS)]
            for t in range(query.shape[2]):
                visible = seen[b, t].nonzero().squeeze(-1)
                scores = scaling * (k[visible] @ query[b, h, t])
                rows.append(scores.softmax(0) @ v[visible])
    return torch.stack(rows).view(*query.shape[:3], -1)


def inputs(T: int, S: int, dtype: torch.dtype, rows: int = 3) -> tuple[list[Tensor], Tensor]:
    """Queries (as a transposed view, the way a model makes them), keys and values; and who sees whom."""
    generator = torch.Generator().manual_seed(T * 100 + S)
    query = torch.randn(rows, T, HEADS, D, generator=generator).to(dtype).transpose(1, 2)
    key = torch.randn(rows, KEY_HEADS, S, D, generator=generator).to(dtype)
    value = torch.randn(rows, KEY_HEADS, S, E, generator=generator).to(dtype)
    # Prompts of several lengths, padded behind, and then each query's own past.
    before = torch.tensor([S - T, max(0, S - T - 2), max(0, S - T - 1)])[:rows, None, None]
    own = torch.arange(S) - (S - T)
    seen = torch.where(own >= 0, own <= torch.arange(T)[:, None], torch.arange(S) < before)
    return [query, key, value], seen


def gradients(out: Tensor, wanted: list[Tensor]) -> list[Tensor]:
    """Of a sum with weights that differ everywhere."""
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    return list(torch.autograd.grad((out.double() * weights).sum(), wanted))


@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize(("T", "S", "causal"), [(5, 9, False), (1, 4, False), (7, 7, True)])
@pytest.mark.parametrize("block_elements", [1, 2 * HEADS * 5 * 9, 2**20])
def test_results_and_gradients_are_those_of_a_loop(
    T: int, S: int, causal: bool, scaling: float | None, block_elements: int
) -> None:
    tensors, seen = inputs(T, S, torch.float32)
    ours = [x.detach().requires_grad_(True) for x in tensors]
    theirs = [x.detach().double().requires_grad_(True) for x in tensors]
    mask = None if causal else seen[:, None]
    found = attention.attend(*ours, mask, scaling, block_elements)
    expected = by_hand(*theirs, seen, 1 / math.sqrt(D) if scaling is None else scaling)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    for mine, right in zip(gradients(found, ours), gradients(expected, theirs), strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-5, atol=1e-6)


def test_a_mask_without_rows_is_for_all_of_them() -> None:
    tensors, _ = inputs(6, 6, torch.float32)
    window = (torch.arange(6)[:, None] - torch.arange(6)).abs() < 2
    found = attention.attend(*tensors, window)
    torch.testing.assert_close(found, attention.attend(*tensors, window.expand(3, 1, 6, 6)), rtol=0, atol=0)
    expected = by_hand(*(x.double() for x in tensors), window.expand(3, 6, 6), 1 / math.sqrt(D))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def eager(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """As transformers' own models compute it."""
    key, value = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (key, value))
    scores = (query @ key.mT * D**-0.5).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value


@pytest.mark.parametrize(("in_common", "allowed"), [(0.0, 2.0), (4.0, 1.0)])
def test_in_bfloat16_it_errs_as_eager_attention_and_less_where_keys_are_alike(
    in_common: float, allowed: float
) -> None:
    (query, key, value), seen = inputs(40, 90, torch.float32)
    generator = torch.Generator().manual_seed(0)
    key, value = (
        x + in_common * torch.randn(3, KEY_HEADS, 1, x.shape[-1], generator=generator) for x in (key, value)
    )
    tensors, mask = [x.bfloat16() for x in (query, key, value)], seen[:, None]
    ours, theirs = ([x.detach().requires_grad_(True) for x in tensors] for _ in range(2))
    exact = [x.detach().double().requires_grad_(True) for x in tensors]
    outs = attention.attend(*ours, mask), eager(*theirs, mask), by_hand(*exact, seen, D**-0.5)
    found, usual, right = (
        [out, *gradients(out, wanted)] for out, wanted in zip(outs, (ours, theirs, exact), strict=True)
    )
    for mine, its, true in zip(found, usual, right, strict=True):
        error, bound = ((x.double() - true).norm() / true.norm() for x in (mine, its))
        assert error < allowed * bound and error < 0.01, (error, bound)


def test_what_is_kept_for_the_backward_pass_does_not_grow_with_the_pairs() -> None:
    kept: list[int] = []
    for T in (8, 16):
        tensors, seen = inputs(T, 64, torch.float32)
        sizes: list[int] = []

        def note(x: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            attention.attend(*(x.requires_grad_(True) for x in tensors), seen[:, None])
        kept.append(sum(sizes))
    per_query = 3 * (HEADS * D + 64)  # a query's heads, and whom it sees, once for all heads
    assert kept[1] - kept[0] == 8 * per_query


def test_it_is_taken_on_a_cpu_in_bfloat16_for_rows_of_bounded_size() -> None:
    (query, key, _), _ = inputs(5, 9, torch.bfloat16)
    assert attention.suits(query, key)
    assert not attention.suits(query.float(), key.float())
    assert not attention.suits(query[:, :, :0], key), "nothing to attend"
    long = query.new_empty(1, 1, 1, D).expand(1, HEADS, 2048, D)
    assert not attention.suits(long, key.new_empty(1, 1, 1, D).expand(1, KEY_HEADS, 2048, D))


@pytest.mark.parametrize(("dtype", "taken"), [(torch.bfloat16, True), (torch.float32, False)])
def test_rows_of_groups_use_it_under_autocast(dtype: torch.dtype, taken: bool) -> None:
    tensors, seen = inputs(4, 7, dtype)
    wanted = [x.detach().requires_grad_(True) for x in tensors]
    out = shared_prefix._attend(*wanted, seen[:, None], None)
    assert (type(out.grad_fn).__name__ == "_AttentionBackward") == taken
