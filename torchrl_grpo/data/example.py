"""One problem: the messages a model sees and the truth its answer is judged by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Example:
    """One problem.

    Attributes:
        id: stable name of the row, unique within its data set, e.g. ``"gsm8k/train/17"``.
        messages: chat messages ``[{"role": ..., "content": ...}, ...]`` ending with the user's turn.
        truth: what the rewards need, JSON-serializable; its keys belong to the data set.
    """

    id: str
    messages: list[dict[str, str]]
    truth: dict[str, Any] = field(default_factory=dict)
