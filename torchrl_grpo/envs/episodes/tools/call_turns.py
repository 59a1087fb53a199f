"""A message of the assistant with calls, as a chat template takes it, and where its rendering ends."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_grpo.envs.episodes.tools.call_formats import ToolCall

# Stands for the argument of the last call. No template changes letters.
_ARGUMENT = "zqxargumentxqz"
# What a model writes is an identifier only if a template takes it: see ``_FORMS`` of ``learn_calls``.
_ID = re.compile(r"[A-Za-z0-9]{9}|functions\.[\w.-]{1,64}:\d{1,9}")


@dataclass(frozen=True)
class CallMessage:
    """The form in which a chat template takes a message with calls.

    Attributes:
        id: identifier of a call, with ``{name}`` and ``{number}`` for its name and its number in the message.
        as_text: whether arguments are JSON in a text, not objects.
        content: content of a message that has only calls.
    """

    id: str
    as_text: bool
    content: str | None

    def with_calls(self, calls: Sequence[ToolCall], content: str = "") -> dict[str, Any]:
        """Return a message with calls."""
        return {
            "role": "assistant",
            "content": content or self.content,
            "tool_calls": [
                {
                    "type": "function",
                    "id": self.id_of(call, number),
                    "function": {"name": call.name, "arguments": self._arguments(call)},
                }
                for number, call in enumerate(calls)
            ],
        }

    def id_of(self, call: ToolCall, number: int) -> str:
        """Return the identifier that the model gave a call, or else one that the template takes."""
        if call.id is not None and _ID.fullmatch(call.id):
            return call.id
        return self.id.format(name=call.name, number=number)

    def _arguments(self, call: ToolCall) -> Any:
        # A template writes this text as it is.
        return json_text(call.arguments) if self.as_text else call.arguments


def json_text(value: Any) -> str:
    """Return a value as JSON, as chat templates write it."""
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class CallTurn:
    """How messages with calls are rendered.

    Attributes:
        message: form of the message.
        close: what the template writes between the last argument and the end of the message.
        end: text of the control token that ends the message; None if the template writes none.
        takes_one: whether the template takes only one call, and one result, after a message.
    """

    message: CallMessage
    close: str
    end: str | None
    takes_one: bool

    def before(self, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the message with calls that stands for the model's before the results of these calls."""
        last = len(results) - 1
        calls = [
            ToolCall(result["name"], {"zqx": _ARGUMENT if number == last else "-"}, id=result["tool_call_id"])
            for number, result in enumerate(results)
        ]
        return self.message.with_calls(calls)

    def after(self, text: str) -> str | None:
        """Return what the template writes from the end token of that message on; None if it is not found."""
        _, mark, rest = text.partition(_ARGUMENT)
        if not mark:
            return None
        if self.end is not None:
            at = rest.find(self.end)
            return rest[at:] if at >= 0 else None
        return rest.removeprefix(self.close) if rest.startswith(self.close) else None
