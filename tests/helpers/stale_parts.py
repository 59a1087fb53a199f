"""Weights that do not arrive whole, planted on purpose: every part of every tensor, in any engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from torchrl_grpo.errors import UserError
from torchrl_grpo.inference.protocol import Engine
from torchrl_grpo.inference.transformers_engine import TransformersEngine
from torchrl_grpo.weight_sync.probe import named_weights
from torchrl_grpo.weight_sync.publisher import WeightPublisher

PARTS = ("tensor", "row", "element", "two rows swapped")
FORMATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Fault:
    """The tensor ``name`` partly stays ``old``, as it was, or two of its rows change places."""

    name: str
    part: str
    old: Tensor

    def applied(self, name: str, tensor: Tensor) -> Tensor:
        """What arrives where ``tensor`` is sent under ``name``."""
        if name != self.name:
            return tensor
        spoiled = tensor.clone()
        rows, old = spoiled.view(-1, tensor.shape[-1]), self.old.view(-1, tensor.shape[-1])
        if self.part == "tensor":
            rows.copy_(old)
        elif self.part == "row":
            rows[-1] = old[-1]
        elif self.part == "element":
            rows[len(rows) // 2, -1] = old[len(rows) // 2, -1]
        else:
            rows[[0, -1]] = rows[[-1, 0]]
        return spoiled


class Faulty(Engine):
    """An engine that weights reach with a fault, where one is planted; stands before the engine's class."""

    fault: Fault | None = None

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        fault = self.fault
        super().update(weights if fault is None else ((n, fault.applied(n, t)) for n, t in weights))  # type: ignore[safe-super]


class KeepsAPart(Faulty, TransformersEngine):
    """An engine that weights do not reach whole."""


def move_everything(model: Any, seed: int, size: float = 0.1) -> None:
    """So far that each number is another one in 16 bits too, those that were zero included."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(size * (1 + torch.rand(p.shape, generator=g)) * (-1) ** seed)


Cases = Sequence[tuple[str, str]]


def every_part(publisher: WeightPublisher) -> Cases:
    """Every published tensor with each of the parts that it has."""
    return [
        (name, part)
        for name, tensor in named_weights(publisher.model)
        for part in PARTS
        if tensor.dim() > 1 or part != PARTS[3]
    ]


def share_of(cases: Cases, dtype: torch.dtype) -> Cases:
    """A third of the cases; the three formats together have all of them, and each has all kinds of parts."""
    number, formats = FORMATS.index(dtype), len(FORMATS)
    # Three parts of a tensor follow each other, so each three begin with another format.
    return [case for index, case in enumerate(cases) if (index + index // formats) % formats == number]


def of_each_kind(cases: Cases) -> Cases:
    """A tensor of each kind, as it is in all layers, with one part: another part for the next kind."""
    kinds: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for name, part in cases:
        kinds.setdefault(tuple(p for p in name.split(".") if not p.isdigit()), []).append((name, part))
    return [of_kind[number % len(of_kind)] for number, of_kind in enumerate(kinds.values())]


def assert_each_is_found(
    publisher: WeightPublisher,
    step: Callable[[int], object],
    plant: Callable[[Fault | None], object],
    cases: Cases,
    move: Callable[[Any, int], None] = move_everything,
) -> None:
    """Move all weights and publish them with a fault, once for each case; a sound publication then passes.

    Args:
        publisher: whose engine takes weights for the first time, or has passed the start test.
        step: publishes.
        plant: puts a fault on the way to the engine, or takes it away.
        cases: tensors and parts.
        move: changes every published number.
    """
    assert cases
    count = len(dict(named_weights(publisher.model)))
    for number, (name, part) in enumerate(cases):
        old = dict(named_weights(publisher.model))[name].detach().to(publisher.engine_dtype).clone()
        move(publisher.model, number)
        plant(Fault(name, part, old))
        with pytest.raises(UserError, match=rf"1 of {count} tensors .* first is {name}: "):
            step(1)
    plant(None)
    step(2)
