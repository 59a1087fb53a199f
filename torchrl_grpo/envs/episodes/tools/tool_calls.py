"""Tool calls in the text of a model, and the description of tools for models whose template has none."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Thoughts are no calls. Thoughts that do not end hide the rest.
_THOUGHTS = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool that the model has written.

    Attributes:
        name: name of the tool; empty if the call is malformed.
        arguments: arguments by name.
        error: why the call is malformed, for the model; None if it is well formed.
    """

    name: str
    arguments: dict[str, Any]
    error: str | None = None


def parse_calls(text: str) -> list[ToolCall]:
    """Find the tool calls in a message.

    Each call is ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as the templates of Qwen and
    Hermes ask for. A message that is nothing but such a JSON object, as Llama 3 writes it, is a call too;
    there ``parameters`` may stand for ``arguments``. What stands between ``<think>`` and ``</think>`` is no
    call.

    Args:
        text: message of the model.

    Returns:
        The calls in their order, malformed ones too; empty if the message has none.
    """
    if "</think>" in text and "<think>" not in text.partition("</think>")[0]:
        # The prompt has opened the thoughts.
        text = text.partition("</think>")[2]
    text = _THOUGHTS.sub("", text)
    found = _CALL.findall(text)
    if found:
        return [_parse(one) for one in found]
    whole = text.strip()
    if whole.startswith("{") and '"name"' in whole:
        call = _parse(whole)
        return [call] if call.error is None else []
    return []


def _parse(text: str) -> ToolCall:
    try:
        value = json.loads(text.strip())
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, f"the call is not valid JSON: {error}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall("", {}, 'a call needs {"name": NAME, "arguments": {...}}')
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return ToolCall(value["name"], {}, "the arguments of a call are an object with their names")
    return ToolCall(value["name"], arguments)


def describe(schemas: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a system message about tools, for a chat template that does not describe them."""
    lines = "\n".join(json.dumps(schema) for schema in schemas)
    return (
        "You can call these tools:\n"
        f"<tools>\n{lines}\n</tools>\n"
        "To call one, write:\n"
        '<tool_call>\n{"name": "NAME", "arguments": {"ARGUMENT": VALUE}}\n</tool_call>'
    )
