"""Interface through which the publisher sends weights to the engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from torchrl_grpo.inference.protocol import Inference, NextTokens, Probe


class Delivery(Protocol):
    """Weights that were sent to one engine or to several."""

    def wait(self) -> None:
        """Block until every engine has taken the weights and has returned its probe result."""

    def answers(self) -> Iterator[NextTokens]:
        """Probe results that have arrived and were not returned before."""


class Transport(Protocol):
    """Carries weights to engines. It does not judge whether they arrived."""

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int, probe: Probe) -> Delivery:
        """Read all weights and send them.

        Args:
            weights: names and tensors in the engine's number format; read before this returns.
            version: number of optimizer steps that produced these weights.
            probe: prompts for which each engine returns its likeliest next tokens with the new weights.
        """


class Delivered:
    """A :class:`Delivery` that is complete.

    Args:
        answer: the engine's probe result.
    """

    def __init__(self, answer: NextTokens) -> None:
        self._answers = [answer]

    def wait(self) -> None:
        """See :meth:`Delivery.wait`."""

    def answers(self) -> Iterator[NextTokens]:
        """See :meth:`Delivery.answers`."""
        while self._answers:
            yield self._answers.pop()


class DirectTransport:
    """Hands weights to one engine, which takes them before :meth:`send` returns.

    Args:
        engine: engine that takes the weights.
    """

    def __init__(self, engine: Inference) -> None:
        self._engine = engine

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int, probe: Probe) -> Delivery:
        """See :meth:`Transport.send`."""
        return Delivered(self._engine.publish(weights, version, probe))


def stacked(answers: Iterable[NextTokens]) -> NextTokens:
    """Probe results of several engines as one: their rows are concatenated."""
    listed = list(answers)
    before = [answer.before for answer in listed if answer.before is not None]
    return NextTokens(
        torch.cat([answer.token_ids for answer in listed]),
        torch.cat([answer.log_probs for answer in listed]),
        sum(answer.cached_tokens for answer in listed),
        tuple(one for answer in listed for one in answer.checksums),
        stacked(before) if len(before) == len(listed) else None,
    )
