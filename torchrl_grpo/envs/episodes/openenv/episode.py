"""One episode of an OpenEnv environment, as an environment of episodes."""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Mapping
from typing import Any

from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.episodes.openenv.actions import ActionForm, NoAction
from torchrl_grpo.envs.episodes.openenv.arguments import OBSERVATION, OpenEnvArguments
from torchrl_grpo.envs.episodes.openenv.session import ServerError, Session, SessionLost, open_session
from torchrl_grpo.envs.episodes.types import Message, Step, cut, encodable, step_from

# Share of the time limit of a call after which this process says what is wrong. Then it is ended.
_OWN_SHARE = 0.9
# Sessions in which one action is tried. An action may end the session each time.
_MOST_SESSIONS = 3


class OpenEnvEpisode:
    """An episode on a server.

    If the connection ends in the middle of an episode, another session repeats its actions. An environment
    that then answers something else cannot be continued, and the episode fails.

    Args:
        url: address of the server.
        form: how an action is made of what the model writes.
        limit_s: time limit of a call in seconds.
        max_characters: longest text of an answer to an action.
        arguments: arguments of the environment.
    """

    def __init__(
        self, url: str, form: ActionForm, limit_s: float, max_characters: int, arguments: OpenEnvArguments
    ) -> None:
        self._url, self._form, self._limit_s = url, form, limit_s
        self._max_characters = max_characters
        self._fields, self._parameters = arguments.fields, arguments.reset
        self._session: Session | None = None
        # What was sent in this episode, with digests of the answers: whole ones may be large.
        self._sent: list[tuple[str, dict[str, Any], bytes]] = []

    def reset(self, example: Example) -> list[Message]:
        """Start the episode, and return the question with what the environment shows."""
        parameters = example.columns.get("reset")
        if parameters is None:
            parameters = {"seed": zlib.crc32(example.id.encode()) >> 1}
        if not isinstance(parameters, Mapping):
            raise TypeError(f"the column reset is {parameters!r:.80}, not a mapping of parameters")
        answer = self._ask("reset", {**self._parameters, **parameters})
        text = encodable(self._text(answer))
        *before, last = example.messages
        content = last["content"]
        if OBSERVATION not in content and text:
            content += f"\n\n{OBSERVATION}"
        return [*before, {**last, "content": content.replace(OBSERVATION, text)}]

    def step(self, message: str) -> Step:
        """Answer a message. Without a call it ends an episode whose actions are calls."""
        if self._form.is_call:
            return Step(done=True)
        try:
            return self._act(self._form.of_message(message))
        except NoAction as error:
            return Step([{"role": "user", "content": f"error: {error}"}])

    def call_tool(self, name: str, arguments: Mapping[str, Any]) -> tuple[Step, bool]:
        """Answer a call.

        Returns:
            The answer, and whether the call was no action.
        """
        try:
            return self._act(self._form.of_call(name, arguments)), False
        except NoAction as error:
            return Step([{"role": "user", "content": str(error)}]), True

    def close(self) -> None:
        """End the session."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _act(self, action: dict[str, Any]) -> Step:
        try:
            answer = self._ask("step", action)
        except ServerError as error:
            if error.code == "VALIDATION_ERROR":
                raise NoAction(cut(encodable(str(error)), self._max_characters)) from error
            raise
        reward, done = answer.get("reward"), answer.get("done", False)
        if not isinstance(done, bool):
            raise TypeError(f"done is {done!r:.80}, not true or false")
        text = cut(encodable(self._text(answer)), self._max_characters)
        return step_from((text, 0.0 if reward is None else reward, done))

    def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        end = time.monotonic() + _OWN_SHARE * self._limit_s
        for sessions_left in reversed(range(_MOST_SESSIONS)):
            try:
                answer = self._open(end).ask(kind, data, end)
            except SessionLost:
                self.close()
                if not sessions_left:
                    raise
            except TimeoutError:
                # A late answer would be taken for that to the next message.
                self.close()
                raise
            else:
                self._sent.append((kind, data, _digest(answer)))
                return answer
        raise AssertionError

    def _open(self, end: float) -> Session:
        if self._session is None:
            session = open_session(self._url, end)
            try:
                self._repeat(session, end)
            except BaseException:
                session.close()
                raise
            self._session = session
        return self._session

    def _repeat(self, session: Session, end: float) -> None:
        """Repeat what was sent in this episode in a new session."""
        changed = f"the session with {self._url} ended, and a new one answers the same actions otherwise"
        try:
            for kind, data, digest in self._sent:
                if _digest(session.ask(kind, data, end)) != digest:
                    raise ServerError(changed)
        except ServerError as error:
            # Without its code, which may be that of a wrong action.
            raise ServerError(changed) from error

    def _text(self, answer: dict[str, Any]) -> str:
        observation = answer.get("observation")
        if not isinstance(observation, dict):
            raise TypeError(f"the observation is {observation!r:.80}, not an object")
        if self._form.kind == "mcp" and "tool_name" in observation:
            return _tool_result(observation)
        fields = self._fields or [name for name in observation if name != "metadata"]
        missing = [name for name in fields if name not in observation]
        if missing:
            known = ", ".join(observation)
            raise ValueError(f"environment_args.observation has {missing[0]!r}, and there is only {known}")
        shown = {name: observation[name] for name in fields if observation[name] is not None}
        if self._fields or (len(shown) == 1 and all(isinstance(value, str) for value in shown.values())):
            return "\n".join(map(_as_text, shown.values()))
        return _as_text(shown) if shown else ""


def _tool_result(observation: Mapping[str, Any]) -> str:
    """Return the text of the result of an environment's own tool."""
    error = observation.get("error")
    if error is not None:
        return f"error: {_as_text(error.get('message', error) if isinstance(error, dict) else error)}"
    result = observation.get("result")
    if isinstance(result, dict):
        data, content = result.get("data"), result.get("content")
        if data is not None:
            return _as_text(data)
        if isinstance(content, list):
            parts = [part.get("text") for part in content if isinstance(part, dict)]
            return "\n".join(part for part in parts if isinstance(part, str))
    return _as_text(result)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _digest(answer: dict[str, Any]) -> bytes:
    """Return a digest of what must be the same when an episode is repeated: all but the metadata."""
    observation = answer.get("observation")
    if isinstance(observation, dict):
        observation = {name: value for name, value in observation.items() if name != "metadata"}
    compared = [observation, answer.get("reward"), answer.get("done")]
    return hashlib.sha256(json.dumps(compared, sort_keys=True).encode()).digest()
