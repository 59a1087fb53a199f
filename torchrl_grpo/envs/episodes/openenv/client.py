"""An OpenEnv environment in the host of the episodes: its server, what it offers, and its episodes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torchrl_grpo.config.remote import command, is_url, place
from torchrl_grpo.envs.episodes.openenv.actions import ACT, ActionForm, form_of, parameters_of
from torchrl_grpo.envs.episodes.openenv.arguments import OpenEnvArguments
from torchrl_grpo.envs.episodes.openenv.episode import OpenEnvEpisode
from torchrl_grpo.envs.episodes.openenv.server import StartedServer
from torchrl_grpo.envs.episodes.openenv.session import (
    NoRoom,
    ServerError,
    Session,
    get_json,
    open_session,
    until,
)


class OpenEnvClient:
    """An OpenEnv environment.

    Args:
        name: name as in ``env.environment``.
        arguments: ``env.environment_args``.
        limit_s: time limit of a call in seconds.
        max_characters: longest text of an answer to an action.

    Attributes:
        server: the server, if a command starts it; None if somebody else has started it.
    """

    def __init__(self, name: str, arguments: Mapping[str, Any], limit_s: float, max_characters: int) -> None:
        self._arguments = OpenEnvArguments(**arguments)
        self._limit_s, self._max_characters = limit_s, max_characters
        where = place(name)
        self.server = None if is_url(where) else StartedServer(command(where))
        self._url = where if self.server is None else self.server.url

    def describe(self, limit_s: float, count: int) -> dict[str, Any]:
        """Return what the environment offers, when its server is up.

        Args:
            limit_s: time for all of it, and for the start of a server that a command starts.
            count: number of episodes at a time, for which the server must have room.

        Returns:
            ``form``, the fields of its :class:`ActionForm`, and ``tools``, a list with name, description and
            parameters of each.
        """
        process = None if self.server is None else self.server.process
        start = time.monotonic()
        end = start + (self._limit_s if process is None else limit_s)
        schema: Any = until(lambda: get_json(self._url, "/schema", end), end, process).get("action")
        form = form_of(schema, self._arguments.action)
        sessions = [open_session(self._url, end, process)]
        try:
            tools = sessions[0].ask("step", {"type": "list_tools"}, end) if form.kind == "mcp" else {}
            while len(sessions) < count:
                # Of many sessions on a distant server, each may take its time, as in an episode.
                own_end = min(start + limit_s, time.monotonic() + self._limit_s)
                sessions.append(Session(self._url, max(end, own_end)))
        except NoRoom as error:
            raise ServerError(
                f"{self._url} has room for {len(sessions)} sessions, and up to {count} episodes run at a "
                f"time; start it with max_concurrent_envs={count} or more, or lower env.num_envs, "
                "env.repeats and eval.num_problems"
            ) from error
        finally:
            for session in sessions:
                session.close()
        if form.kind == "mcp":
            return {"form": asdict(form), "tools": _listed(tools)}
        if form.kind == "tool":
            description = str(schema.get("description") or "Act in the environment.")
            tool = {"name": ACT, "description": description, "parameters": parameters_of(schema)}
            return {"form": asdict(form), "tools": [tool]}
        return {"form": asdict(form), "tools": []}

    def episode(self, form: Mapping[str, Any]) -> OpenEnvEpisode:
        """Return a new episode.

        Args:
            form: ``form`` that :meth:`describe` returned.
        """
        made = ActionForm(**form)
        return OpenEnvEpisode(self._url, made, self._limit_s, self._max_characters, self._arguments)


def _listed(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    observation = answer.get("observation")
    tools = observation.get("tools") if isinstance(observation, dict) else None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ServerError("the environment does not list its tools")
    return [
        {
            "name": tool.get("name"),
            "description": tool.get("description"),
            "parameters": tool.get("input_schema"),
        }
        for tool in tools
    ]
