"""Draw problems by what is known of their pass rate: the share of right responses in a group."""

from __future__ import annotations

import bisect
import math
import random
import threading
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.stream import CountedStream

# Weight of the newest group in a problem's pass rate.
_NEWEST = 0.5
# Number of draws before the newest observed one whose problems are remembered.
_REMEMBERED = 100_000


class _WeightTree:
    """Whole weights of many entries, of which one changes or is found in logarithmic time (a Fenwick tree).

    Sums of whole numbers are exact. So what is found depends on the weights alone, and not on the order in
    which they were set.

    Args:
        weights: weights of the entries.
    """

    def __init__(self, weights: Iterable[int]) -> None:
        self._weights = list(weights)
        # sums[k - 1] is the sum of the entries that end with number k - 1, as many as the lowest bit of k.
        self._sums = self._weights.copy()
        for end in range(1, len(self._sums) + 1):
            above = end + (end & -end)
            if above <= len(self._sums):
                self._sums[above - 1] += self._sums[end - 1]
        self.total = sum(self._weights)

    def set(self, index: int, weight: int) -> None:
        """Change the weight of an entry."""
        change = weight - self._weights[index]
        self._weights[index] = weight
        self.total += change
        end = index + 1
        while change and end <= len(self._sums):
            self._sums[end - 1] += change
            end += end & -end

    def find(self, place: int) -> int:
        """Return the first entry that makes the sum of all weights up to it larger than ``place``."""
        index, width = 0, 1 << len(self._sums).bit_length()
        while width := width >> 1:
            if index + width <= len(self._sums) and self._sums[index + width - 1] <= place:
                index += width
                place -= self._sums[index - 1]
        return index


class PassRateStream(CountedStream):
    """A stream in which the weight of a problem depends on its pass rate.

    The pass rates fall into bands, each with a weight. A problem that no group has answered has a weight of
    its own. Draws are with replacement. Which problem a draw has depends on the seed, the number of the draw
    and the pass rates known at the first time it is asked for; it stays the same from then on.

    Args:
        examples: the problems.
        seed: seed of the draws.
        bands: N - 1 bounds between N bands, in increasing order.
        weights: weight of a problem in each of the N bands.
        unseen_weight: weight of a problem whose pass rate is not known.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        seed: int,
        *,
        bands: Sequence[float],
        weights: Sequence[float],
        unseen_weight: float,
    ) -> None:
        super().__init__(examples, seed, shuffle=False)
        self.bands, self.weights, self.unseen_weight = list(bands), list(weights), unseen_weight
        # The same weights as whole numbers.
        exact = [Fraction(weight) for weight in (unseen_weight, *weights)]
        scale = math.lcm(*(weight.denominator for weight in exact))
        self._unseen_parts, *self._parts = (int(weight * scale) for weight in exact)
        self._lock = threading.Lock()
        self._rates: dict[int, float] = {}
        self._tree = self._make_tree()
        self._chosen: dict[int, int] = {}

    def reseeded(self, seed: int) -> PassRateStream:
        """Return a new stream of the same examples with another seed, which knows no pass rate."""
        return PassRateStream(
            self.examples,
            seed,
            bands=self.bands,
            weights=self.weights,
            unseen_weight=self.unseen_weight,
        )

    def at(self, number: int) -> Example:
        """Return the example of draw ``number``. Thread-safe."""
        with self._lock:
            if number not in self._chosen:
                self._chosen[number] = self._choose(number)
            return self.examples[self._chosen[number]]

    def _choose(self, number: int) -> int:
        draw = Fraction(random.Random(f"{self.seed}/pass_rate/{number}").random())
        # If all weights are 0, every problem is as likely as any other.
        if self._tree.total == 0:
            return int(draw * len(self.examples))
        return self._tree.find(int(draw * self._tree.total))

    def _make_tree(self) -> _WeightTree:
        parts = [self._unseen_parts] * len(self.examples)
        for index, rate in self._rates.items():
            parts[index] = self._part(rate)
        return _WeightTree(parts)

    def _part(self, rate: float) -> int:
        return self._parts[bisect.bisect_right(self.bands, rate)]

    def observe(self, rates: Mapping[int, float]) -> None:
        """Take note of the pass rates of groups, by the numbers of their draws."""
        with self._lock:
            for number, rate in rates.items():
                index = self._chosen[number]
                before = self._rates.get(index, rate)
                self._rates[index] = before + _NEWEST * (rate - before)
                self._tree.set(index, self._part(self._rates[index]))
            oldest = max(rates) - _REMEMBERED
            for number in [draw for draw in self._chosen if draw < oldest]:
                del self._chosen[number]

    def metrics(self) -> dict[str, float]:
        """Return the share of problems whose pass rate is known, and the mean of the known rates."""
        with self._lock:
            known = list(self._rates.values())
        return {
            "data/seen": len(known) / len(self.examples),
            "data/pass_rate": sum(known) / len(known) if known else 0.0,
        }

    def learned_state(self) -> dict[str, Any]:
        """Return the pass rates and the chosen problems, as values of JSON."""
        with self._lock:
            rates, chosen = list(self._rates.items()), list(self._chosen.items())
        # Sorting a million of them takes a second, and a draw would wait for the lock.
        return {"rates": sorted(rates), "chosen": sorted(chosen)}

    def load_learned_state(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`learned_state`."""
        with self._lock:
            self._rates = {int(index): float(rate) for index, rate in state["rates"]}
            self._chosen = {int(number): int(index) for number, index in state["chosen"]}
            self._tree = self._make_tree()
