"""What an environment of several turns is, and what a step of it returns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torchrl_grpo.data.example import Example, is_role

Message = dict[str, Any]


@dataclass
class Step:
    """Answer of an environment to a message of the model.

    Attributes:
        messages: messages that the model reads next, each ``{"role": ..., "content": ...}``.
        reward: reward of the message; the rewards of an episode are added up.
        done: whether the episode ends.
    """

    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False


class Environment(Protocol):
    """One episode of an environment. A new object is created for each episode.

    ``reset`` and ``step`` may be coroutine functions.
    """

    def reset(self, example: Example) -> Sequence[Message] | str | None:
        """Start the episode of a problem.

        Args:
            example: the problem.

        Returns:
            The messages of the prompt; a text is one message of the user, and None keeps those of the
            example. All responses to a problem share the prompt, so it must depend on the example only.
        """
        ...

    def step(self, message: str) -> Any:
        """Answer a message of the model.

        Args:
            message: text of the message, as rewards read it.

        Returns:
            A :class:`Step`, or the three of it in a tuple ``(messages, reward, done)``. ``messages`` may also
            be a text, which is one message of the user.
        """
        ...


class EpisodeError(Exception):
    """The environment of an episode failed."""


def messages_from(value: Any, what: str) -> list[Message]:
    """Turn a text or a list of messages into a list of messages.

    Args:
        value: what the user's code returned.
        what: name of the value, for messages of errors.

    Raises:
        TypeError: it is neither.
    """
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": "user", "content": encodable(value)}]
    if not isinstance(value, Sequence):
        raise TypeError(f"{what} is {type(value).__name__} {value!r:.80}, not a text or a list of messages")
    for message in value:
        is_message = isinstance(message, Mapping) and is_role(message.get("role"))
        if not is_message or not isinstance(message.get("content"), str):
            raise TypeError(
                f"{what} has {message!r:.80}, which is no message; write {{'role': 'user', 'content': TEXT}}"
            )
    return [{**message, "content": encodable(message["content"])} for message in value]


def step_from(value: Any) -> Step:
    """Turn what ``step`` returned into a :class:`Step`.

    Raises:
        TypeError: it is neither a step nor a tuple of three, or a part has another type.
        ValueError: the reward is not finite, or the episode goes on without a message.
    """
    if isinstance(value, Step):
        value = (value.messages, value.reward, value.done)
    if not isinstance(value, tuple | list) or len(value) != 3:
        raise TypeError(f"step returned {value!r:.80}, not (messages, reward, done)")
    messages, reward, done = value
    if isinstance(reward, str | None):
        raise TypeError(f"the reward of step is {reward!r:.80}, not a number")
    number = float(reward)
    if not math.isfinite(number):
        raise ValueError(f"the reward of step is {number}, not a finite number")
    if isinstance(done, str | None):
        raise TypeError(f"done of step is {done!r:.80}, not True or False")
    step = Step(messages_from(messages, "messages of step"), number, bool(done))
    if not step.messages and not step.done:
        raise ValueError("step returned no message and done=False, so the model has nothing to answer")
    return step


def encodable(text: str) -> str:
    """Replace lone surrogates, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode("utf-8")


def cut(text: str, max_characters: int) -> str:
    """Cut a text to a length, and say so at its end."""
    if len(text) <= max_characters:
        return text
    return f"{text[:max_characters]} ... (cut after {max_characters} characters)"
