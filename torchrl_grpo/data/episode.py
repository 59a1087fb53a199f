"""The record of an episode of several turns, and its last answer as text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class EpisodeRecord:
    """What an episode came to, besides its tokens.

    Attributes:
        messages: messages after the prompt, in order: the model's, and what its environment and tools said.
        messages_of_model: texts of those of the model.
        reward: sum of the environment's rewards; 0 without an environment.
        turns: number of the model's messages.
        tool_calls: number of calls of tools.
        tool_errors: number of those that failed. The model was told why.
        error: why the environment failed and the episode ended; None if it did not.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    messages_of_model: list[str] = field(default_factory=list)
    reward: float = 0.0
    turns: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    error: str | None = None

    def add_message_of_model(self, text: str) -> None:
        """Append a message of the model."""
        self.messages.append({"role": "assistant", "content": text})
        self.messages_of_model.append(text)


class EpisodeText(str):
    """The model's last message in an episode, as rewards read it, with the record of the episode.

    Attributes:
        record: the record.
    """

    record: EpisodeRecord

    def __new__(cls, text: str, record: EpisodeRecord) -> EpisodeText:
        """Return ``text`` with ``record``."""
        made = super().__new__(cls, text)
        made.record = record
        return made

    def __reduce__(self) -> tuple[type[EpisodeText], tuple[str, EpisodeRecord]]:
        return EpisodeText, (str(self), self.record)
