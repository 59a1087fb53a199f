"""The order of the training problems: endless, shuffled anew each epoch, resumable.

The order of an epoch depends on the seed and the epoch's number alone, never on a generator that
something else could advance, so two numbers are the whole state. Left out: weights and mixtures.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from torchrl_grpo.data.example import Example
from torchrl_grpo.errors import CheckpointError, DataError


class PromptStream:
    """Hands out examples without end; each epoch holds every example once.

    Args:
        examples: the rows, in file order.
        seed: with the epoch's number it determines the order.
        shuffle: ``False`` keeps file order in every epoch.

    Raises:
        DataError: there are no examples.
    """

    def __init__(self, examples: Sequence[Example], seed: int, shuffle: bool = True) -> None:
        if not examples:
            raise DataError("There are 0 training examples; env.data_path must name data with rows in it.")
        # Not copied: procedural data generates a problem when it is asked for.
        self.examples = examples
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.position = 0
        self._order = self.order(0)
        self._orders: dict[int, list[int]] = {}

    def order(self, epoch: int) -> list[int]:
        """Row numbers in the order of an epoch."""
        rows = list(range(len(self.examples)))
        if self.shuffle:
            # A string seed is hashed with SHA-512: the same on every machine, and no two of
            # (seed, epoch) share an order by adding up to the same number.
            random.Random(f"{self.seed}/{epoch}").shuffle(rows)
        return rows

    @property
    def drawn(self) -> int:
        """How many examples have been handed out since the very beginning."""
        return self.epoch * len(self.examples) + self.position

    def epoch_of(self, number: int) -> int:
        """The epoch in which example ``number`` is handed out."""
        return number // len(self.examples)

    def at(self, number: int) -> Example:
        """The example handed out as number ``number`` since the very beginning, 0 being the first."""
        epoch, position = self.epoch_of(number), number % len(self.examples)
        rows = self._orders.get(epoch)
        if rows is None:
            rows = self.order(epoch)
            # Bound anew and never changed: several threads ask. Groups on their way are of two epochs mostly.
            near = {known: kept for known, kept in self._orders.items() if abs(known - epoch) <= 1}
            self._orders = {**near, epoch: rows}
        return self.examples[rows[position]]

    def draw(self, count: int) -> list[Example]:
        """The next ``count`` examples; the end of an epoch runs on into the next one."""
        drawn: list[Example] = []
        while len(drawn) < count:
            if self.position == len(self.examples):
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self.order(self.epoch)
            rows = self._order[self.position : self.position + count - len(drawn)]
            self.position += len(rows)
            drawn += [self.examples[row] for row in rows]
        return drawn

    def state_dict(self) -> dict[str, int]:
        """Epoch, and how many of its examples are gone."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on where the state was taken.

        Raises:
            CheckpointError: the position does not exist in this data.
        """
        epoch, position = int(state["epoch"]), int(state["position"])
        if epoch < 0 or not 0 <= position <= len(self.examples):
            raise CheckpointError(
                f"The checkpoint stands at example {position} of epoch {epoch}, but the data has "
                f"{len(self.examples)} examples: resume with the data (env.dataset, env.data_path) the run "
                "began with, or start a new run with resume=null."
            )
        self.epoch, self.position = epoch, position
        self._order = self.order(epoch)
