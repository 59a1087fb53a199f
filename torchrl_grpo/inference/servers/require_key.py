"""ASGI middleware that refuses every request without the server's key.

vLLM's own check covers a few prefixes only. Routes that pause the server, load weights or call a method of
the worker lie outside them. SGLang's own check leaves out the routes that tell of its health, and takes the
key from the command line, which other users of the machine see.

Only ``/health`` is open, for programs that watch whether the server is up. Without the key it has no content.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import MutableMapping
from typing import Any

from torchrl_grpo.config.values import KEY_VARIABLE
from torchrl_grpo.inference.servers.asgi import App, Receive, Scope, Send, send_json
from torchrl_grpo.inference.servers.lifetime import READY_VARIABLE

# Says whether the server is up, by its status.
_OPEN = "/health"


class RequireKey:
    """Middleware for vLLM's ``--middleware``, and for SGLang's application.

    Args:
        app: application behind it.
        variable: environment variable with the key.

    Raises:
        RuntimeError: the environment has no key.
    """

    def __init__(self, app: App, variable: str = KEY_VARIABLE) -> None:
        key = os.environ.get(variable)
        if not key:
            raise RuntimeError(f"{variable} is not set: a server without a key would obey everybody")
        self._app = app
        self._digest = _digest(key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with status 401. The status of ``/health`` needs no key."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, _announcing(send))
        elif self._is_allowed(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http" and scope["method"] in ("GET", "HEAD") and scope["path"] == _OPEN:
            await self._app(scope, receive, _without_content(send))
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send_json(send, 401, {"error": "Unauthorized"})

    def _is_allowed(self, scope: Scope) -> bool:
        header = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = header.partition(b" ")
        # Digests are compared, so that the time taken tells nothing about the key.
        return scheme.lower() == b"bearer" and secrets.compare_digest(_digest(key), self._digest)


def _without_content(send: Send) -> Send:
    """Return ``send``, but leave out the body and every header of the application."""

    async def bare(message: MutableMapping[str, Any]) -> None:
        empty = {"headers": [(b"content-length", b"0")]} if "status" in message else {"body": b""}
        await send({**message, **empty})

    return bare


def _announcing(send: Send) -> Send:
    """Return ``send``, but tell the process that started this one when the application is up."""

    async def announce(message: MutableMapping[str, Any]) -> None:
        await send(message)
        if message["type"] == "lifespan.startup.complete" and READY_VARIABLE in os.environ:
            os.write(int(os.environ.pop(READY_VARIABLE)), b"\n")

    return announce


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
