"""Responses as rewards read them, and the record of an episode of several turns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self


@dataclass
class EpisodeRecord:
    """What an episode came to, besides its tokens.

    Attributes:
        messages: messages after the prompt, in order: the model's, and what its environment and tools said.
        messages_of_model: texts of those of the model.
        block: closed thoughts at the end of the prompt of the model's last message, as in
            :class:`ResponseText`.
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
    block: str = ""

    def add_message_of_model(self, text: str) -> None:
        """Append a message of the model. It begins with the tags that its prompt has opened."""
        self.messages.append({"role": "assistant", "content": text})
        self.messages_of_model.append(text)


class ResponseText(str):
    r"""A response as rewards read it. It begins with the tags that the prompt has opened, as ``<think>``.

    Of an episode, it is the model's last message.

    Attributes:
        block: closed thoughts at the end of the prompt, such as ``<think>\n\n</think>\n\n``; usually empty.
            They are not part of the text.
        record: record of an episode; None for a response of one turn.
    """

    block: str
    record: EpisodeRecord | None

    def __new__(cls, text: str, block: str = "", record: EpisodeRecord | None = None) -> Self:
        """Return ``text`` with ``block`` and ``record``."""
        made = super().__new__(cls, text)
        made.block, made.record = block, record
        return made

    def __reduce__(self) -> tuple[type[ResponseText], tuple[str, str, EpisodeRecord | None]]:
        return ResponseText, (str(self), self.block, self.record)
