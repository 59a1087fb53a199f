"""Rewards of control arms. What a model learns from them, it has not learned from right answers."""

from __future__ import annotations

import random
import re
from typing import Any

_draw = random.Random(0)


def chance(completion: str, example: Any) -> float:
    """Return 0 or 1 at random, whatever the response is."""
    return float(_draw.random() < 0.5)


def form(completion: str, example: Any, pattern: str) -> float:
    """Return 1 if the whole response has the form of an answer, right or wrong."""
    return float(re.fullmatch(pattern, completion.strip()) is not None)
