"""Interface through which the publisher sends weights to the engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from torchrl_grpo.inference.protocol import Probe, ProbeResult


class Delivery(Protocol):
    """Weights that were sent to one engine or to several."""

    def wait(self) -> None:
        """Block until every engine has loaded the weights and has returned its probe result."""

    def new_results(self) -> Iterator[ProbeResult]:
        """Probe results that have arrived and were not returned before."""


class Transport(Protocol):
    """Carries weights to engines. It does not verify that they arrived."""

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int, probe: Probe) -> Delivery:
        """Read all weights and send them.

        Args:
            weights: names and tensors in the engine's dtype; read before this returns. They may be read
                again, for an engine that starts later, while they are those that were published last.
            version: number of optimizer steps that produced these weights.
            probe: prompts for which each engine returns its likeliest next tokens with the new weights.
        """


def concatenate_results(results: Iterable[ProbeResult]) -> ProbeResult:
    """Probe results of several engines as one: their rows are concatenated."""
    listed = list(results)
    initial = [result.initial_result for result in listed if result.initial_result is not None]
    return ProbeResult(
        torch.cat([result.token_ids for result in listed]),
        torch.cat([result.log_probs for result in listed]),
        sum(result.cached_tokens for result in listed),
        tuple(checksums for result in listed for checksums in result.checksums),
        concatenate_results(initial) if len(initial) == len(listed) else None,
    )
