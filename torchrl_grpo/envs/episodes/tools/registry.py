"""Tools by name: the built-in ones, and those of the user."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_grpo.envs.episodes.tools.calculator import calculator
from torchrl_grpo.envs.episodes.tools.python_tool import run_python
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.runtime import user_code


def _python(code: str) -> None:
    """Run Python code and return what it prints. It has no network and no files.

    Args:
        code: The code. Print what you want to see.
    """


@dataclass(frozen=True)
class Tool:
    """A tool that the model may call.

    Attributes:
        name: name by which the model calls it.
        spec: entry of ``env.tools``.
        schema: JSON schema for the chat template.
        run: function of the arguments of a call and of its time limit in seconds, if the tool is built in;
            None if it runs in the process of an episode.
        is_quick: whether a call takes a moment at most, and need not run in another thread.
    """

    name: str
    spec: str
    schema: dict[str, Any]
    run: Callable[[Mapping[str, Any], float], str] | None
    is_quick: bool = False


def _calculator() -> Tool:
    def run(arguments: Mapping[str, Any], limit_s: float) -> str:
        return calculator(str(arguments["expression"]))

    return Tool("calculator", "calculator", _schema(calculator, "calculator"), run, is_quick=True)


def _python_tool() -> Tool:
    def run(arguments: Mapping[str, Any], limit_s: float) -> str:
        return run_python(str(arguments["code"]), limit_s)

    return Tool("python", "python", _schema(_python, "python", "python"), run)


#: The built-in tools.
BUILT_IN: dict[str, Callable[[], Tool]] = {"calculator": _calculator, "python": _python_tool}


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
    if spec in BUILT_IN:
        return BUILT_IN[spec]()
    if user_code.parse(spec) is None:
        raise ConfigError(
            f"env.tools has {spec!r}, which is no tool; write {', '.join(BUILT_IN)}, "
            "FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION"
        )
    found = user_code.load(spec, "env.tools")
    name = spec.rpartition(":")[2]
    return Tool(name, spec, _schema(_called(found, spec), spec, name), None)


def _called(found: Any, spec: str) -> Any:
    if not inspect.isclass(found):
        return found
    if "__call__" not in {name for base in found.__mro__[:-1] for name in vars(base)}:
        raise ConfigError(
            f"env.tools has {spec!r}, whose objects cannot be called; give the class a method __call__"
        )
    user_code.check_arguments(found, {}, "env.tools")
    return found.__call__


def _schema(function: Callable[..., Any], spec: str, name: str | None = None) -> dict[str, Any]:
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    try:
        schema: dict[str, Any] = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException, NameError, ValueError) as error:
        raise ConfigError(
            f"env.tools has {spec!r}, whose description cannot be made: {error}. Annotate every parameter, "
            "and describe the function and each parameter in its docstring, under 'Args:'"
        ) from error
    if name is not None:
        schema["function"]["name"] = name
    return schema


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
