"""Random numbers with which the transformers engine samples, one independent stream for each response.

A response depends on its own seed and on the number of its tokens, and not on other responses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# SplitMix64 (Steele, Lea and Flood 2014): the increment of its state, and the factors of its output function,
# as signed 64-bit numbers.
INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_SHIFTS = (30, 27, 31)
# Bits of a uniform number. With one more, the largest would round to 1 in float32.
_BITS = 23


class Noise:
    """Draws standard exponential numbers for the rows of a batch of responses.

    The sampled token has the smallest number / probability (exponential race).

    On a CPU each row has a generator of PyTorch. On a GPU the numbers are a hash of the row's seed, of the
    number of the draw and of the token (SplitMix64), for all rows at once. Generators would launch a kernel
    for each row, and drawing on the CPU would copy a row of the vocabulary for each token.

    Args:
        seeds: seed of each row. With None, PyTorch's default generator draws the numbers on a CPU, and a seed
            on a GPU.
        device: device of the numbers.
    """

    def __init__(self, seeds: Sequence[int | None], device: torch.device) -> None:
        self._draws = 0
        self._device = device
        self._generators = [None if seed is None else torch.Generator().manual_seed(seed) for seed in seeds]
        if device.type != "cpu":
            keys = [signed(_random_seed() if seed is None else seed) for seed in seeds]
            # Hashed, so that rows with neighboring seeds do not share a part of their streams.
            self._keys = mixed(torch.tensor(keys)).to(device)

    def draw(self, vocabulary: int) -> Tensor:
        """Return the next standard exponential numbers of every row, ``[rows, vocabulary]`` float32."""
        if self._device.type == "cpu":
            if all(generator is None for generator in self._generators):
                return torch.empty(len(self._generators), vocabulary).exponential_()
            return torch.stack([torch.empty(vocabulary).exponential_(generator=g) for g in self._generators])
        self._draws += 1
        return hashed(self._keys + signed(INCREMENT * self._draws), vocabulary)


def hashed(keys: Tensor, vocabulary: int) -> Tensor:
    """Return standard exponential numbers ``[rows, vocabulary]`` float32 for int64 ``keys`` ``[rows]``."""
    counters = torch.arange(vocabulary, device=keys.device).mul_(INCREMENT)
    bits = mixed(mixed(keys)[:, None] + counters)
    uniform = bits.bitwise_right_shift_(64 - _BITS).bitwise_and_(2**_BITS - 1).float()
    # Between 2^-24 and 1 - 2^-24. The logarithm of 1 - u is exact for small u, which decide.
    return uniform.add_(0.5).mul_(-(2.0**-_BITS)).log1p_().neg_()


def mixed(state: Tensor) -> Tensor:
    """Return SplitMix64's output function of int64 numbers. Products wrap around."""
    for shift, factor in zip(_SHIFTS, (*_FACTORS, None), strict=True):
        # A right shift repeats the sign, which the mask removes.
        state = state ^ state.bitwise_right_shift(shift).bitwise_and_(2 ** (64 - shift) - 1)
        if factor is not None:
            state = state.mul_(factor)
    return state


def signed(number: int) -> int:
    """Return the signed 64-bit number that is equal to ``number`` modulo 2^64."""
    return (number + 2**63) % 2**64 - 2**63


def _random_seed() -> int:
    return int(torch.randint(2**63 - 1, ()))
