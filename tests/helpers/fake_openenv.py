"""A small OpenEnv server: it speaks the protocol, keeps a record, and does wrong what a test asks for.

    python fake_openenv.py PORT

Its environment turns a message around. The rewards and the end depend on the message and the seed only.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import sys
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import Server, ServerConnection, serve

TEXT = {
    "properties": {"metadata": {"type": "object"}, "message": {"type": "string"}},
    "required": ["message"],
}
NUMBER = {"properties": {"number": {"type": "integer"}}, "required": ["number"]}
TOOLS = {
    "properties": {
        "type": {"const": "call_tool", "type": "string"},
        "tool_name": {"type": "string"},
        "arguments": {"type": "object"},
    },
    "required": ["tool_name"],
}
ADD = {
    "name": "add",
    "description": "Add numbers.",
    "input_schema": {
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


@dataclass
class Session:
    """A session and what was sent in it: kinds and data, with the answers."""

    connection: ServerConnection
    sent: list[tuple[str, Any, Any]] = field(default_factory=list)
    seed: int = 0
    steps: int = 0
    is_closed: bool = False


class FakeOpenEnv:
    """A server in threads of this process.

    Args:
        action: JSON schema of an action.
        change: function of a session, the kind of a message and the answer to it, which returns the text that
            is sent, a list of texts, or None to close the connection.
        most_sessions: number of sessions at a time.
        port: port; 0 for any.

    Attributes:
        sessions: all sessions so far.
    """

    def __init__(
        self,
        action: dict[str, Any] = TEXT,
        change: Callable[[Session, str, dict[str, Any]], str | bytes | list[str] | None] | None = None,
        most_sessions: int = 1_000,
        port: int = 0,
    ) -> None:
        self.sessions: list[Session] = []
        self.change = change or (lambda session, kind, answer: json.dumps(answer))
        self.schema: Any = {"action": action}
        self._most_sessions = most_sessions
        self._lock = threading.Lock()
        self._server: Server = serve(
            self._serve, "127.0.0.1", port, process_request=self._page, max_size=None, ping_interval=None
        )
        self.url = f"http://127.0.0.1:{self._server.socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> FakeOpenEnv:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()

    def serve(self) -> None:
        self._server.serve_forever()

    def cut(self, draw: random.Random) -> bool:
        """Cut the connection of any open session, and return whether there was one."""
        with self._lock:
            sessions = [session for session in self.sessions if not session.is_closed]
        if sessions:
            with contextlib.suppress(OSError):
                draw.choice(sessions).connection.socket.shutdown(socket.SHUT_RDWR)
        return bool(sessions)

    def _page(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path != "/schema":
            return None
        body = json.dumps(self.schema).encode()
        return Response(HTTPStatus.OK, "OK", Headers({"Content-Length": str(len(body))}), body)

    def _serve(self, connection: ServerConnection) -> None:
        session = Session(connection)
        with self._lock:
            has_room = sum(not other.is_closed for other in self.sessions) < self._most_sessions
            if has_room:
                self.sessions.append(session)
        if not has_room:
            connection.send(json.dumps(_error("no room", "CAPACITY_REACHED")))
            return
        try:
            for text in connection:
                message = json.loads(text)
                kind, data = message["type"], message.get("data")
                if kind == "close":
                    break
                answer = _answer(session, kind, data)
                session.sent.append((kind, data, answer))
                reply = self.change(session, kind, answer)
                if reply is None:
                    break
                for part in reply if isinstance(reply, list) else [reply]:
                    connection.send(part)
        except ConnectionClosed:
            pass
        finally:
            session.is_closed = True


def _answer(session: Session, kind: str, data: Any) -> dict[str, Any]:
    if kind == "state":
        return {"type": "state", "data": {"step_count": session.steps}}
    if kind == "reset":
        session.seed, session.steps = data.get("seed", 0), 0
        return _observation({"text": f"seed {session.seed}", "metadata": {"at": id(session)}}, None, False)
    if data.get("type") == "list_tools":
        return _observation({"tools": [ADD], "metadata": {}}, None, False)
    session.steps += 1
    if data.get("type") == "call_tool":
        total = sum(data["arguments"].values())
        result = {"content": [{"type": "text", "text": str(total)}], "data": total}
        observation = {"tool_name": data["tool_name"], "result": result, "error": None, "metadata": {}}
        return _observation(observation, float(total == session.seed), total == session.seed)
    text = data.get("message", data.get("number"))
    if not isinstance(text, str | int):
        return _error("no action", "VALIDATION_ERROR")
    number = zlib.crc32(f"{session.seed} {session.steps} {text}".encode())
    return _observation(
        {"text": str(text)[::-1][:40], "metadata": {"at": id(session)}}, number % 100 / 100, number % 3 == 0
    )


def _observation(observation: dict[str, Any], reward: float | None, done: bool) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


def _error(message: str, code: str) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code}}


if __name__ == "__main__":
    FakeOpenEnv(port=int(sys.argv[1])).serve()
