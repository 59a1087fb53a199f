"""Tools that another program offers. What it says about them is checked before the model reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from torchrl_grpo.envs.episodes.tools.tool import Tool
from torchrl_grpo.envs.episodes.types import encodable
from torchrl_grpo.errors import ConfigError

# Letters that no chat template and no format of calls takes for something else.
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
# What this project's own words begin with, by which it finds its way in what a chat template writes.
_OWN_WORDS = "zqx"
# Longest description of a tool with its parameters, as JSON.
_MOST_CHARACTERS = 16_384


def offered_tool(offer: Mapping[str, Any], spec: str, *, of_environment: bool = False) -> Tool:
    """Return a tool that a program offers.

    Args:
        offer: name, description and parameters, as the program gives them.
        spec: entry of ``env.tools``, or ``env.environment``.
        of_environment: whether a call is a step of the environment.

    Raises:
        ConfigError: the offer is no description of a tool, or too long.
    """
    name, description, parameters = offer.get("name"), offer.get("description"), offer.get("parameters")
    wrong = _wrong(name, description, parameters)
    if wrong is not None:
        raise _refused(spec, name, wrong)
    assert isinstance(parameters, dict)
    described = {
        "name": name,
        "description": encodable(description or f"The tool {name}."),
        "parameters": {"type": "object", "properties": {}, "required": [], **parameters},
    }
    schema = {"type": "function", "function": described}
    return Tool(str(name), spec, schema, None, is_remote=True, of_environment=of_environment)


def check_text(tool: Tool, tokens: list[str]) -> None:
    """Refuse a tool whose description has the text of control tokens.

    Args:
        tool: tool that another program offers.
        tokens: control tokens in its schema.

    Raises:
        ConfigError: there are some.
    """
    if tokens:
        wrong = f"its description has {tokens[0]}, which is a control token of the model"
        raise _refused(tool.spec, tool.name, wrong)


def _refused(spec: str, name: object, wrong: str) -> ConfigError:
    shown = name if isinstance(name, str) else "without a name"
    return ConfigError(
        f"{spec!r} offers a tool {shown!r:.80} that cannot be used: {wrong}; correct the server, or name "
        "those of its tools that the model may call in env.allowed_tools"
    )


def _wrong(name: object, description: object, parameters: object) -> str | None:
    """Return what is wrong with an offer, or None."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        return "its name is not one of 1 to 64 letters, digits, _ and -"
    if not isinstance(description, str | None):
        return "its description is no text"
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        return "its parameters are no JSON schema of an object"
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if not isinstance(properties, dict) or not all(isinstance(part, dict) for part in properties.values()):
        return "its parameters have no mapping of properties"
    names = {_NAME.fullmatch(key) and key for key in properties}
    if None in names:
        return "the name of a parameter is not one of 1 to 64 letters, digits, _ and -"
    if not isinstance(required, list) or not all(isinstance(key, str) and key in names for key in required):
        return "it requires parameters that it does not describe"
    try:
        text = json.dumps([name, description, parameters], ensure_ascii=False)
        text.encode()
        has_types = all(map(_has_types, properties.values()))
    except (ValueError, RecursionError):
        return "its parameters are no JSON of ordinary text"
    if len(text) > _MOST_CHARACTERS:
        return f"its description has {len(text)} characters, more than {_MOST_CHARACTERS}"
    if not has_types:
        return "a type of its parameters is no name of a type and no list of names"
    return f"it has the letters {_OWN_WORDS}, which are reserved" if _OWN_WORDS in text else None


def _has_types(schema: object) -> bool:
    """Whether a schema, with each of its choices, declares its types as a name or a list of names."""
    if not isinstance(schema, dict):
        return False
    declared = schema.get("type", [])
    names = [declared] if isinstance(declared, str) else declared
    choices = [schema.get(key, []) for key in ("anyOf", "oneOf")]
    return (
        isinstance(names, list)
        and all(isinstance(name, str) for name in names)
        and all(isinstance(some, list) and all(map(_has_types, some)) for some in choices)
    )
