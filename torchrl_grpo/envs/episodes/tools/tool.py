"""What a tool is, and how it is described to the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torchrl_grpo.errors import ConfigError


class StartedTool(Protocol):
    """A tool that has a state, in one episode."""

    def run(self, arguments: Mapping[str, Any], limit_s: float) -> str:
        """Run a call, as ``Tool.run`` does."""
        ...

    def close(self) -> None:
        """End it. A call of another thread may run."""
        ...


@dataclass(frozen=True)
class Tool:
    """A tool that the model may call.

    Attributes:
        name: name by which the model calls it.
        spec: entry of ``env.tools``.
        schema: JSON schema for the chat template.
        run: function of the arguments of a call and of its time limit in seconds, if the tool is built in and
            has no state; None if it runs in the process of an episode.
        is_quick: whether a call takes a moment at most, and need not run in another thread.
        is_remote: whether a server of another program has it, to which its process must connect first.
        of_environment: whether a call is a step of the environment.
        start: function that makes what has the tool in one episode, if it is built in and has a state.
    """

    name: str
    spec: str
    schema: dict[str, Any]
    run: Callable[[Mapping[str, Any], float], str] | None
    is_quick: bool = False
    is_remote: bool = False
    of_environment: bool = False
    start: Callable[[], StartedTool] | None = None

    @property
    def is_users(self) -> bool:
        """Whether a function of the user is called in the process of an episode."""
        return self.run is None and self.start is None


def make_schema(function: Callable[..., Any], spec: str, name: str | None = None) -> dict[str, Any]:
    """Make the JSON schema of a tool from the annotations and the docstring of a function.

    Args:
        function: function that the model calls.
        spec: entry of ``env.tools``, for messages.
        name: name of the tool; None for that of the function.

    Raises:
        ConfigError: an annotation or a description is missing.
    """
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    try:
        schema: dict[str, Any] = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException, NameError, ValueError) as error:
        why = str(error).rstrip(".!")
        raise ConfigError(
            f"env.tools has {spec!r}, whose description cannot be made: {why}; annotate every parameter, "
            "and describe the function and each parameter in its docstring, under 'Args:'"
        ) from error
    if name is not None:
        schema["function"]["name"] = name
    return schema
