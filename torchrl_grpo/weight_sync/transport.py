"""Interface through which the publisher sends weights to the engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from torchrl_grpo.inference.protocol import Probe, ProbeResult


class Delivery(Protocol):
    """Weights that were sent to one engine or to several."""

    def wait(self) -> None:
        """Block until every engine that is up has loaded the weights and has returned its probe result."""

    def new_results(self) -> Iterator[ProbeResult]:
        """Probe results that have arrived and were not returned before."""


class Transport(Protocol):
    """Carries weights to engines. It does not verify that they arrived."""

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int, probe: Probe) -> Delivery:
        """Read all weights and send them.

        Args:
            weights: names and tensors in the engine's dtype. All are read before this returns. They may be
                iterated over again, for an engine that starts later. That happens only before the next
                optimizer step, so the weights are still those of ``version``.
            version: number of optimizer steps that produced these weights.
            probe: prompts for which each engine returns its likeliest next tokens with the new weights.
        """


class SentWeights:
    """The weights of one publication, which a transport may read several times.

    Args:
        read: function that yields names and weights in the engine's dtype, and adds checksums to a list.

    Attributes:
        sums: names and checksums of what the last reader has read.
    """

    def __init__(self, read: Callable[[list[tuple[str, Tensor]]], Iterator[tuple[str, Tensor]]]) -> None:
        self._read = read
        self.sums: list[tuple[str, Tensor]] = []

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and weights as they are now.

        Up to the next optimizer step they are those of the publication.
        """
        self.sums = []
        yield from self._read(self.sums)


def concatenate_results(results: Iterable[ProbeResult]) -> ProbeResult:
    """Probe results of several engines as one: their rows are concatenated."""
    listed = list(results)
    # An engine's first publication also has the result of the weights that it was built with. Another engine
    # may have had its first before; then rows would be missing, so all are compared or none.
    initial = [result.initial_result for result in listed if result.initial_result is not None]
    return ProbeResult(
        torch.cat([result.token_ids for result in listed]),
        torch.cat([result.log_probs for result in listed]),
        sum(result.cached_tokens for result in listed),
        tuple(checksums for result in listed for checksums in result.checksums),
        concatenate_results(initial) if len(initial) == len(listed) else None,
    )
