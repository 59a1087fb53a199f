"""Counters of a run, and every random state of the process."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy
import torch


@dataclass
class Counters:
    """Where a run stands.

    Attributes:
        step: optimizer steps done, refused ones included.
        steps_left_in_round: steps the buffer still has data for.
        response_tokens: response tokens generated.
        reward_errors: rewards that raised.
        seconds: time spent, over all resumptions.
        accuracy_before: held-out accuracy before training, None where it was not measured.
    """

    step: int = 0
    steps_left_in_round: int = 0
    response_tokens: int = 0
    reward_errors: int = 0
    seconds: float = 0.0
    accuracy_before: float | None = None

    def state_dict(self) -> dict[str, Any]:
        """All of them."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue counting."""
        for name, value in state.items():
            setattr(self, name, value)


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch on every device."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """The states of all these generators, as tensors and plain values."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = cast("tuple[Any, ...]", numpy.random.get_state())
    return {
        "python": [version, list(internal), gauss],
        "numpy": [kind, torch.from_numpy(keys.astype("int64")), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Put them back."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype("uint32"), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        # The run may go on where there are fewer.
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
