"""The order of the training problems: endless, reshuffled each epoch, and resumable.

The order of an epoch depends only on the seed and the number of the epoch, and not on the state of a random
generator. So two numbers are the whole state. Weighted sampling and mixtures of data sets are not supported.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

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
                f"{len(self.examples)} examples. Resume with the data (env.dataset, env.data_path) of the "
                "original run, or start a new run with resume=null."
            )
        self.epoch, self.position = epoch, position
        self._current_order = self.epoch_order(epoch)
