"""Tools by name: the built-in ones, and those of the user."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_grpo.config.builtin import TOOLS, load_built_in
from torchrl_grpo.envs.episodes.tools.tool import Tool, make_schema
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.runtime import user_code


def load_tools(specs: Sequence[str]) -> list[Tool]:
    """Load the tools that ``env.tools`` names, and make their schemas.

    Args:
        specs: names of built-in tools, and names of functions or classes as in
            :func:`~torchrl_grpo.runtime.user_code.load`. The objects of a class are called like functions;
            each episode has its own.

    Raises:
        ConfigError: there is no such tool, two have the same name, or a function has no annotations or no
            docstring, from which the schema is made.
    """
    tools: dict[str, Tool] = {}
    for spec in specs:
        tool = _load(spec)
        if tool.name in tools:
            raise ConfigError(
                f"env.tools names two tools {tool.name!r}: {tools[tool.name].spec} and {spec}; rename one"
            )
        tools[tool.name] = tool
    return list(tools.values())


def _load(spec: str) -> Tool:
    if spec in TOOLS:
        built: Tool = load_built_in(TOOLS[spec])()
        return built
    target = user_code.load(spec, "env.tools")
    name = spec.rpartition(":")[2]
    return Tool(name, spec, make_schema(_called(target, spec), spec, name), None)


def _called(target: Any, spec: str) -> Any:
    if not inspect.isclass(target):
        return target
    if "__call__" not in {name for base in target.__mro__[:-1] for name in vars(base)}:
        raise ConfigError(
            f"env.tools has {spec!r}, whose objects cannot be called; give the class a method __call__"
        )
    user_code.check_arguments(target, {}, "env.tools")
    return target.__call__


def check_arguments(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str | None:
    """Compare the arguments of a call with the schema of its tool.

    Returns:
        What is wrong, for the model; None if a call can be made.
    """
    described = schema["function"]["parameters"]
    known = described.get("properties", {})
    unknown = [name for name in arguments if name not in known]
    missing = [name for name in described.get("required", []) if name not in arguments]
    if unknown:
        return f"there is no argument {unknown[0]!r}; the arguments are {', '.join(known) or 'none'}"
    return f"the argument {missing[0]!r} is missing" if missing else None
