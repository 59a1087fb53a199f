"""The order of the training problems: endless, reshuffled each epoch, and resumable.

The order of an epoch depends only on the seed and the number of the epoch, and not on the state of a random
generator. So two numbers are the whole state.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_grpo.data.example import Example
from torchrl_grpo.errors import CheckpointError, DataError


class PromptStream:
    """An endless stream of examples. Each epoch has every example once.

    Args:
        examples: examples in file order.
        seed: seed of the order of all epochs.
        shuffle: whether epochs are shuffled. False keeps the file order.

    Raises:
        DataError: there are no examples.
    """

    def __init__(self, examples: Sequence[Example], seed: int, shuffle: bool = True) -> None:
        if not examples:
            raise DataError(
                "There are 0 training examples; write as env.data_path a file with at least one row."
            )
        # The sequence is not copied, because procedural data generates problems on access.
        self.examples = examples
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.position = 0
        self._current_order = self.epoch_order(0)
        self._order_cache: dict[int, list[int]] = {}

    def epoch_order(self, epoch: int) -> list[int]:
        """Return the indices of the examples in the order of an epoch."""
        rows = list(range(len(self.examples)))
        if self.shuffle:
            # Python hashes a string seed with SHA-512. The result is the same on every machine, and two pairs
            # (seed, epoch) with the same sum do not share an order.
            random.Random(f"{self.seed}/{epoch}").shuffle(rows)
        return rows

    @property
    def drawn(self) -> int:
        """Number of examples drawn since the start of the run."""
        return self.epoch * len(self.examples) + self.position

    def epoch_of(self, number: int) -> int:
        """Return the epoch of draw ``number``."""
        return number // len(self.examples)

    def at(self, number: int) -> Example:
        """Return the example of draw ``number``, counted from 0 at the start of the run. Thread-safe."""
        epoch, position = self.epoch_of(number), number % len(self.examples)
        rows = self._order_cache.get(epoch)
        if rows is None:
            rows = self.epoch_order(epoch)
            # Replace the dictionary instead of changing it, because several threads read it. Groups in flight
            # almost always belong to at most two epochs, so only neighboring epochs are kept.
            near = {known: kept for known, kept in self._order_cache.items() if abs(known - epoch) <= 1}
            self._order_cache = {**near, epoch: rows}
        return self.examples[rows[position]]

    def draw(self, count: int) -> list[Example]:
        """Draw the next ``count`` examples, continuing with the next epoch at the end of one."""
        drawn: list[Example] = []
        while len(drawn) < count:
            if self.position == len(self.examples):
                self.epoch, self.position = self.epoch + 1, 0
                self._current_order = self.epoch_order(self.epoch)
            rows = self._current_order[self.position : self.position + count - len(drawn)]
            self.position += len(rows)
            drawn += [self.examples[row] for row in rows]
        return drawn

    def reseeded(self, seed: int) -> PromptStream:
        """Return a new stream of the same examples with another seed."""
        return PromptStream(self.examples, seed, self.shuffle)

    def observe(self, rates: Mapping[int, float]) -> None:
        """Take note of the pass rates of groups, by number. A stream without a curriculum does not."""

    def metrics(self) -> dict[str, float]:
        """Return metrics of what the stream has learned; none without a curriculum."""
        return {}

    def learned_state(self) -> dict[str, Any]:
        """Return what the stream has learned, for a checkpoint; nothing without a curriculum."""
        return {}

    def load_learned_state(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`learned_state`."""

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of examples drawn in it."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from the position of a state.

        Raises:
            CheckpointError: the position does not exist in this data.
        """
        epoch, position = int(state["epoch"]), int(state["position"])
        if epoch < 0 or not 0 <= position <= len(self.examples):
            raise CheckpointError(
                f"The checkpoint is at example {position} of epoch {epoch}, but the data has "
                f"{len(self.examples)} examples; resume with the data (env.dataset, env.data_path) of the "
                "original run, or start a new run with resume=null"
            )
        self.epoch, self.position = epoch, position
        self._current_order = self.epoch_order(epoch)


class CountedStream(PromptStream):
    """A stream in which a draw's number determines its example, so the count of draws is the whole state."""

    def draw(self, count: int) -> list[Example]:
        """Draw the next ``count`` examples."""
        first = self.drawn
        self.epoch, self.position = divmod(first + count, len(self.examples))
        return [self.at(first + offset) for offset in range(count)]


#: Draws within which a mixture has its parts in exact proportion.
MIXTURE_BLOCK = 1_000


class MixtureStream(CountedStream):
    """An endless stream of several data sets, each with epochs of its own.

    Of every :data:`MIXTURE_BLOCK` draws, each part has its share, in an order that depends only on the seed
    and on the number of the block. So the number of draws is the whole state, as without a mixture.

    Args:
        examples: examples of all parts.
        parts: weight and examples of each part.
        seed: seed of all orders.
        shuffle: whether the epochs of the parts are shuffled.

    Raises:
        DataError: a part has no examples.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        parts: Sequence[tuple[float, Sequence[Example]]],
        seed: int,
        shuffle: bool = True,
    ) -> None:
        super().__init__(examples, seed, shuffle)
        self._weighted = list(parts)
        self._parts = [PromptStream(part, seed, shuffle) for _, part in parts]
        self._shares = shares([weight for weight, _ in parts], MIXTURE_BLOCK)
        # The newest block: its number, and for each of its draws the part and the number of the draw within
        # the part's share.
        self._block: tuple[int, list[tuple[int, int]]] = (-1, [])

    def reseeded(self, seed: int) -> MixtureStream:
        """Return a new stream of the same examples with another seed."""
        return MixtureStream(self.examples, self._weighted, seed, self.shuffle)

    def at(self, number: int) -> Example:
        """Return the example of draw ``number``. Thread-safe."""
        block, place = divmod(number, MIXTURE_BLOCK)
        known, order = self._block
        if known != block:
            order = self._order_of_block(block)
            # Replaced as a whole, because several threads read it.
            self._block = block, order
        part, number_in_part = order[place]
        return self._parts[part].at(block * self._shares[part] + number_in_part)

    def _order_of_block(self, block: int) -> list[tuple[int, int]]:
        chosen = [part for part, share in enumerate(self._shares) for _ in range(share)]
        random.Random(f"{self.seed}/mixture/{block}").shuffle(chosen)
        counts = [0] * len(self._parts)
        order = []
        for part in chosen:
            order.append((part, counts[part]))
            counts[part] += 1
        return order


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Divide a total by weights into whole numbers, each at least 1 (largest remainders)."""
    exact = [max(1.0, total * weight / sum(weights)) for weight in weights]
    exact = [total * share / sum(exact) for share in exact]
    counts = [max(1, int(share)) for share in exact]
    order = sorted(range(len(exact)), key=lambda number: int(exact[number]) - exact[number])
    for number in range(total - sum(counts)):
        counts[order[number % len(order)]] += 1
    while sum(counts) > total:
        counts[counts.index(max(counts))] -= 1
    return counts
