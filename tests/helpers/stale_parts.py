"""Weights that do not arrive whole, planted on purpose: every part of every tensor, in any engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """A part of each tensor that ``old`` names stays as it is there, or two of its rows change places."""

    part: str
    old: Mapping[str, Tensor]

    def applied(self, name: str, tensor: Tensor) -> Tensor:
        """What arrives where ``tensor`` is sent under ``name``."""
        if name not in self.old:
            return tensor
        spoiled = tensor.clone()
        rows, old = spoiled.view(-1, tensor.shape[-1]), self.old[name].view(-1, tensor.shape[-1])
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


def of_each_kind(cases: Cases) -> Cases:
    """A tensor of each kind, as it is in all layers, with one part: another part for the next kind."""
    kinds: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for name, part in cases:
        kinds.setdefault(tuple(p for p in name.split(".") if not p.isdigit()), []).append((name, part))
    return [of_kind[number % len(of_kind)] for number, of_kind in enumerate(kinds.values())]


def held_by(publisher: WeightPublisher, names: Sequence[str]) -> dict[str, Tensor]:
    """Copies of published tensors, as the engine has them."""
    weights = dict(named_weights(publisher.model))
    return {name: weights[name].detach().to(publisher.engine_dtype).clone() for name in names}


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
    _assert_found(publisher, step, plant, [([name], part) for name, part in cases], move)


def assert_all_are_found(
    publisher: WeightPublisher,
    step: Callable[[int], object],
    plant: Callable[[Fault | None], object],
    move: Callable[[Any, int], None] = move_everything,
) -> None:
    """As :func:`assert_each_is_found`, with a part of all tensors at a time.

    As many tensors must be wrong as have a fault, so the fault of each is found, whatever the number of
    tensors, with a publication for each kind of part.
    """
    cases = every_part(publisher)
    together = [([name for name, part in cases if part == kind], kind) for kind in PARTS]
    _assert_found(publisher, step, plant, together, move)


def _assert_found(
    publisher: WeightPublisher,
    step: Callable[[int], object],
    plant: Callable[[Fault | None], object],
    faults: Sequence[tuple[list[str], str]],
    move: Callable[[Any, int], None],
) -> None:
    assert faults
    count = len(dict(named_weights(publisher.model)))
    for number, (names, part) in enumerate(faults):
        old = held_by(publisher, names)
        move(publisher.model, number)
        plant(Fault(part, old))
        wrong = rf"{len(names)} of {count} tensors .* first is {min(names)}: "
        with pytest.raises(UserError, match=rf"(?<!\d){wrong}"):
            step(1)
    plant(None)
    step(2)
