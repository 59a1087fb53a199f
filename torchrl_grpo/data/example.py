"""One problem: the chat messages of the prompt and the ground truth for its answer."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Example:
    """One problem.

    Attributes:
        id: stable name of the row, unique within its data set, e.g. ``"gsm8k/train/17"``.
        messages: chat messages ``[{"role": ..., "content": ...}, ...]`` ending with the user's turn.
        truth: JSON-serializable ground truth for the rewards. Each data set has its own keys.
        columns: the row as the data set has it, for rewards of the user; empty for generated problems.
        tools: JSON schemas of the tools that the chat template describes to the model; empty for none.
        part: name of its part of a mixture; empty without a mixture.
    """

    id: str
    messages: list[dict[str, str]]
    truth: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)
    part: str = ""

    def plain(self) -> dict[str, Any]:
        """Return the fields as values of JSON. Dates and the like in the columns become text."""
        fields: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        return fields
