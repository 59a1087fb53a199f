"""Noise of the transformers engine: hashed on a GPU, from generators on a CPU."""

from __future__ import annotations

import math

import pytest
import torch
from pretended_cuda import PretendedCuda
from torch import Tensor

from torchrl_grpo.inference.noise import INCREMENT, Noise, mixed

CUDA = torch.device("cuda:0")


def drawn(seeds: list[int | None], vocabulary: int, draws: int = 1) -> Tensor:
    """All draws of a GPU, ``[draws, rows, vocabulary]``."""
    with PretendedCuda():
        noise = Noise(seeds, CUDA)
        return torch.stack([noise.draw(vocabulary) for _ in range(draws)])


def splitmix64(state: int) -> int:
    """The output function as its authors write it, with unsigned numbers."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return state ^ (state >> 31)


def test_the_hash_is_splitmix64() -> None:
    states = [0, 1, 2**63 - 1, -(2**63), -1, 123456789123456789, INCREMENT]
    hashes = [value % 2**64 for value in mixed(torch.tensor(states)).tolist()]
    assert hashes == [splitmix64(state % 2**64) for state in states]


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    together, alone = drawn([5, 6, -7], 50, draws=3), drawn([6], 50, draws=3)
    assert torch.equal(together[:, 1:2], alone)
    # Seeds, draws and tokens all count.
    assert len(together.unique()) > 0.99 * together.numel()


def test_a_row_without_a_seed_follows_the_default_generator() -> None:
    def row(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return drawn([None], 50)

    assert torch.equal(row(1), row(1)) and not torch.equal(row(1), row(2))


def test_the_numbers_are_exponential() -> None:
    numbers = drawn(list(range(8)), 5000, draws=5).double().flatten()
    assert numbers.min() > 0 and numbers.isfinite().all()
    count = len(numbers)
    # Kolmogorov's distance to 1 - exp(-x); it exceeds this in one of 10,000 samples.
    steps = torch.arange(1, count + 1) / count
    assert (steps - (1 - (-numbers.sort().values).exp())).abs().max() < 2.2 / math.sqrt(count)
    pairs = numbers.view(-1, 2)
    assert abs(float(torch.corrcoef(pairs.T)[0, 1])) < 5 / math.sqrt(len(pairs))


@pytest.mark.parametrize("seeds", [[3, 4], [3, None], [None, None]])
def test_a_cpu_draws_with_torchs_generators(seeds: list[int | None]) -> None:
    torch.manual_seed(0)
    drawn = Noise(seeds, torch.device("cpu")).draw(9)
    torch.manual_seed(0)
    generators = [None if seed is None else torch.Generator().manual_seed(seed) for seed in seeds]
    if seeds == [None, None]:
        expected = torch.empty(2, 9).exponential_()
    else:
        expected = torch.stack([torch.empty(9).exponential_(generator=generator) for generator in generators])
    assert torch.equal(drawn, expected)
