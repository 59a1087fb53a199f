"""The held-out value of a run: guards read it, and a run keeps its best checkpoint and ends by it.

This module only finds the value in the metrics. ``training/evaluator.py`` measures it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

# Metrics that may be the held-out value, the first that is there. The mean of a reward stays beside the
# accuracy that it is.
PRIMARY = ("eval/accuracy", "eval/primary", "eval/loss")


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


def held_out_metric(metrics: Mapping[str, Any]) -> str:
    """Return the name of the held-out value among a step's metrics; empty if the step has no evaluation.

    The newest evaluation decides what a whole run is measured by.
    """
    return next((name for name in PRIMARY if metrics.get(name) is not None), "")


def held_out(metrics: Mapping[str, Any]) -> HeldOut | None:
    """Return the held-out value among a step's metrics; None if the step has no evaluation."""
    if not (name := held_out_metric(metrics)):
        return None
    value = metrics[name]
    # One problem has no interval.
    low, high = (metrics.get(f"{name}_{end}") for end in ("low", "high"))
    low, high = value if low is None else low, value if high is None else high
    # A smaller loss is better.
    return HeldOut(-value, -high, -low) if name == "eval/loss" else HeldOut(value, low, high)
