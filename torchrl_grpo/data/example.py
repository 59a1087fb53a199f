"""One problem: the chat messages of the prompt and the ground truth for its answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Example:
    """One problem.

    Attributes:
        id: stable name of the row, unique within its data set, e.g. ``"gsm8k/train/17"``.
        messages: chat messages ``[{"role": ..., "content": ...}, ...]`` ending with the user's turn.
        truth: JSON-serializable ground truth for the rewards. Each data set has its own keys.
        columns: the row as the data set has it, for rewards of the user; empty for generated problems.
    """

    id: str
    messages: list[dict[str, str]]
    truth: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)
