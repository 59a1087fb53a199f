"""What an action of an OpenEnv environment is to the model: the text of a message, or the call of a tool.

An environment says which fields an action has. If the only one that must be given is a text, it is what the
model writes. Otherwise the action is a tool whose arguments are the fields. An environment of MCP tools
offers those.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchrl_grpo.data.thoughts import end_of_first
from torchrl_grpo.envs.episodes.openenv.session import ServerError

# Name of the tool for an action that has several fields.
ACT = "act"
# Longer numbers would take long to read.
_NUMBER = re.compile(r"[-+]?\d{1,18}(?:\.\d{1,18})?")
_KINDS = {"string": "text", "integer": "integer", "number": "number"}


class NoAction(Exception):
    """What the model wrote is no action. The message is for the model."""


@dataclass(frozen=True)
class ActionForm:
    """How an action is made of what the model writes.

    Attributes:
        kind: ``text``, ``integer`` or ``number`` for a message; ``tool`` for a call whose arguments are the
            fields; ``mcp`` for a call of one of the environment's own tools.
        field: field that a message gives; empty for calls.
    """

    kind: str
    field: str = ""

    @property
    def is_call(self) -> bool:
        """Whether an action is a call."""
        return self.kind in ("tool", "mcp")

    def of_message(self, message: str) -> dict[str, Any]:
        """Return the action that a message is, without the thoughts that it begins with.

        Raises:
            NoAction: the message has no number, and the action needs one.
        """
        if end := end_of_first(message, is_strict=False):
            message = message[end:].lstrip()
        if self.kind == "text":
            return {self.field: message}
        match = _NUMBER.search(message)
        if match is None:
            raise NoAction(f"write a number for {self.field}")
        return {self.field: float(match[0]) if self.kind == "number" else int(match[0].partition(".")[0])}

    def of_call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the action that a call is."""
        if self.kind == "tool":
            return dict(arguments)
        return {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)}


def form_of(schema: Any, field: str | None) -> ActionForm:
    """Return the form of an environment's actions.

    Args:
        schema: JSON schema of an action, as the server gives it.
        field: ``environment_args.action``: the field that a message gives; ``tool`` for calls; None to choose
            by the schema.

    Raises:
        ServerError: the schema is not one of an action.
        ValueError: the field is none of the action's, or cannot be a message.
    """
    properties = schema.get("properties", {}) if isinstance(schema, dict) else None
    required = schema.get("required", []) if isinstance(schema, dict) else None
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise ServerError("/schema has no JSON schema of an object as its action")
    if {"tool_name", "arguments"} <= properties.keys():
        return ActionForm("mcp")
    fields = {name: part for name, part in properties.items() if name != "metadata"}
    if field == "tool":
        return ActionForm("tool")
    if field is None:
        only = required[0] if len(required) == 1 else None
        is_text = isinstance(only, str) and _type(fields.get(only)) == "string"
        return ActionForm("text", str(only)) if is_text else ActionForm("tool")
    if field not in fields:
        raise ValueError(f"the action has no field {field!r}; it has {', '.join(fields) or 'none'}")
    others = [name for name in required if name != field]
    kind = _KINDS.get(_type(fields[field]))
    if kind is None or others:
        why = f"{', '.join(map(str, others))} must be given too" if others else "it is no text and no number"
        raise ValueError(f"the field {field!r} alone is no action, because {why}")
    return ActionForm(kind, field)


def parameters_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of the tool that an action is."""
    properties = {name: part for name, part in schema.get("properties", {}).items() if name != "metadata"}
    parameters = {"type": "object", "properties": properties, "required": schema.get("required", [])}
    return {**parameters, "$defs": schema["$defs"]} if "$defs" in schema else parameters


def _type(part: Any) -> str:
    declared = part.get("type") if isinstance(part, dict) else None
    return declared if isinstance(declared, str) else ""
