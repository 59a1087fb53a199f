"""What a user of TorchRL's ``LLMCollector`` calls on the collectors here, and what is left out.

Both have ``start``, ``shutdown``, ``rollout``, ``policy_version``, ``total_dialog_turns`` and
``dialog_turns_per_batch`` in addition to what is here. They are no subclasses of ``LLMCollector``, because
they hold an engine in place of a policy. ``increment_version`` is left out, because a version belongs to
weights and changes with them. Replay buffers, remote copies and weight updaters are left out, because they
are the trainer's work here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tensordict import TensorDictBase

if TYPE_CHECKING:
    from torchrl_grpo.rollout.round import Round

Postproc = Callable[[TensorDictBase], TensorDictBase]


class CollectorInterface(ABC):
    """Iterating yields a :class:`Round`; :meth:`iterator` and :meth:`next` give its TensorDict alone.

    Attributes:
        total_dialog_turns: number of responses after which iteration ends. The name is TorchRL's.
        postproc: what :meth:`set_postproc` was given.
    """

    total_dialog_turns: int
    postproc: Postproc | None = None
    _tensordicts: Iterator[TensorDictBase] | None = None

    @property
    @abstractmethod
    def dialog_turns_per_batch(self) -> int:
        """Number of responses in a round. The name is TorchRL's."""

    @property
    @abstractmethod
    def policy_version(self) -> int:
        """Number of optimizer steps that produced the weights that sample next."""

    @abstractmethod
    def __iter__(self) -> Iterator[Round]:
        """Rounds until ``total_dialog_turns`` responses have been collected."""

    def get_policy_version(self) -> int:
        """:attr:`policy_version`, as a call."""
        return self.policy_version

    def set_postproc(self, postproc: Postproc) -> None:
        """Have every TensorDict of :meth:`iterator` and :meth:`next` go through ``postproc``.

        Raises:
            RuntimeError: one is set already.
        """
        if self.postproc is not None:
            raise RuntimeError("This collector has a postproc already: compose the two into one")
        self.postproc = postproc

    def iterator(self) -> Iterator[TensorDictBase]:
        """The groups of each round, ``[P]``: see :mod:`~torchrl_grpo.batch.schema`."""
        for round_ in self:
            yield round_.groups if self.postproc is None else self.postproc(round_.groups)

    def next(self) -> TensorDictBase | None:
        """The groups of the next round; None when all turns are collected."""
        if self._tensordicts is None:
            self._tensordicts = self.iterator()
        return next(self._tensordicts, None)
