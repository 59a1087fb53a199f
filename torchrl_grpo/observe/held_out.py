"""The held-out value of a run: guards read it, and a run keeps its best checkpoint and ends by it.

This module only finds the value in the metrics. ``training/evaluator.py`` measures it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class HeldOut(NamedTuple):
    """Held-out value with its 95 % interval; larger is better.

    Attributes:
        value: estimate.
        low: lower end of the interval.
        high: upper end of the interval.
    """

    value: float
    low: float
    high: float


def held_out(metrics: Mapping[str, Any]) -> HeldOut | None:
    """Return the held-out value among a step's metrics; None if the step has no evaluation."""
    for name in ("eval/primary", "eval/accuracy"):
        if name in metrics:
            return HeldOut(metrics[name], metrics[f"{name}_low"], metrics[f"{name}_high"])
    if "eval/loss" not in metrics:
        return None
    # Smaller losses are better, and they have no interval.
    value = -metrics["eval/loss"]
    return HeldOut(value, value, value)
