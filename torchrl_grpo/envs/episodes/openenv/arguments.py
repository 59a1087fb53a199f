"""Arguments of an OpenEnv environment, which the configuration gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchrl_grpo.config.keys import bad_value
from torchrl_grpo.errors import ConfigError

# Stands in a question for what the environment shows at first.
OBSERVATION = "{observation}"


@dataclass(frozen=True)
class OpenEnvArguments:
    """Arguments of an OpenEnv environment: ``env.environment_args``.

    Attributes:
        action: field of the action that a message gives, or ``tool`` for calls whose arguments are the
            fields; None to choose by the action's schema.
        observation: field or fields of an observation that the model reads; empty for all.
        reset: parameters of every reset.
    """

    action: str | None = None
    observation: str | list[str] = field(default_factory=list)
    reset: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.action, str | None):
            raise _wrong("action", self.action, "the name of a field", "{action: message}")
        is_list = isinstance(self.observation, str | list)
        if not is_list or not all(isinstance(name, str) for name in self.fields):
            raise _wrong("observation", self.observation, "a list of fields", "{observation: [prompt]}")
        if not isinstance(self.reset, dict):
            raise _wrong("reset", self.reset, "a mapping of parameters", "{reset: {difficulty: easy}}")

    @property
    def fields(self) -> list[str]:
        """The fields of an observation that the model reads; empty for all."""
        return [self.observation] if isinstance(self.observation, str) else list(self.observation)


def _wrong(name: str, value: Any, what: str, fix: str) -> ConfigError:
    key = f"env.environment_args.{name}"
    return bad_value(key, value, f"it is not {what}", f"env.environment_args={fix}, for example")
