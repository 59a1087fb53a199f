"""HTTP connection to one server, with many requests at a time."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import msgspec

from torchrl_grpo.config.values import KEY_VARIABLE
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.runtime.http_body import BodyTooLong, read_body
from torchrl_grpo.runtime.shared_loop import LoopClosed, SharedLoop

_T = TypeVar("_T")
_UNIX, _JSON = "unix:", "application/json"
# Seconds between two attempts to reach a server that is not up yet.
_RETRY_S = 0.2
# Seconds after which an unused connection is closed. Servers close one after 5 s by default, and a request
# that is sent at that moment is lost.
_IDLE_S = 2.0


@dataclass(frozen=True)
class Call:
    """A request to a server.

    Attributes:
        path: route, with its query.
        body: JSON of the request.
        verb: HTTP's verb.
        may_be_refused: whether status 400 is an answer like others.
        answer: type that the JSON of the answer is read as, and checked by. Entries that it lacks are not
            read, which makes long answers cheap. None for any JSON.
        most_bytes: largest size of an answer that is read.
    """

    path: str
    body: Any = None
    verb: str = "POST"
    may_be_refused: bool = False
    answer: type | None = None
    most_bytes: int = 2**28


class ServerLost(RuntimeError):
    """A server cannot be reached, does not answer in time, or answers with an error."""


class ServerConnection:
    """A connection to one server.

    Args:
        address: ``http://HOST:PORT``, or ``unix:PATH`` for a socket of this machine.
        key: key that the server asks for.
        timeout_s: longest duration of a request that does not generate, in seconds.
        key_variable: environment variable from which the server has its key, for the error message.
    """

    def __init__(self, address: str, key: str, timeout_s: float, key_variable: str = KEY_VARIABLE) -> None:
        self.address = address
        self._key, self._key_variable = key, key_variable
        self._timeout_s = timeout_s
        self._base = "http://server" if address.startswith(_UNIX) else address.rstrip("/")
        self._loop = SharedLoop("servers")
        self._session = self._run(self._open())

    async def _open(self) -> aiohttp.ClientSession:
        # Every request holds a descriptor until its response is complete. Requests beyond half of what the
        # process may have open wait here, and the server queues the others.
        limit = max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        if self.address.startswith(_UNIX):
            path = self.address.removeprefix(_UNIX)
            connector: aiohttp.BaseConnector = aiohttp.UnixConnector(
                path, limit=limit, keepalive_timeout=_IDLE_S
            )
        else:
            connector = aiohttp.TCPConnector(limit=limit, keepalive_timeout=_IDLE_S)
        return aiohttp.ClientSession(
            connector=connector,
            headers={"Authorization": f"Bearer {self._key}"},
            # A response takes as long as it takes: whoever waits for it checks the server.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._timeout_s),
        )

    def wait_until_up(self, timeout_s: float) -> None:
        """Block until the server answers at all.

        Raises:
            ServerLost: it does not answer in time.
        """
        self._run(self._wait_until_up(timeout_s))

    async def _wait_until_up(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not await self._is_up():
                    # Nobody tells this process when a server of somebody else comes up.
                    await asyncio.sleep(_RETRY_S)
        except TimeoutError as error:
            raise ServerLost(f"no server answered at {self.address} within {timeout_s:g} s") from error

    async def _is_up(self) -> bool:
        try:
            async with self._session.get(self._base + "/health", allow_redirects=False):
                return True
        except (aiohttp.ClientError, OSError):
            return False

    def post(self, path: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        """Send a request and return the JSON of the answer.

        Args:
            path: route, with its query.
            body: JSON of the request.
            timeout_s: longest duration in seconds; None for that of the connection.

        Raises:
            ServerLost: no answer, or an answer with an error.
            ConfigError: the server refuses the key.
        """
        return self.send(Call(path, body), timeout_s=timeout_s)

    def send(self, call: Call, *, timeout_s: float | None = None) -> Any:
        """Send a request and return the JSON of the answer; see :meth:`post`."""
        limit = self._timeout_s if timeout_s is None else timeout_s
        return self._run(self._send(call, limit))

    def send_later(self, call: Call, done: Callable[[Any], None]) -> None:
        """Send a request, and call ``done`` with the JSON of the answer or the exception.

        ``done`` runs in the thread of all connections to servers, and must not wait. The request has no time
        limit.

        Raises:
            ServerLost: the connection is closed.
        """

        def finished(future: Future[Any]) -> None:
            try:
                answer = future.result()
            except CancelledError:
                # The connection was closed, and nobody waits any more.
                return
            except Exception as error:  # noqa: BLE001  it is passed on
                answer = error
            done(answer)

        self._submit(self._send(call, None)).add_done_callback(finished)

    async def _send(self, call: Call, timeout_s: float | None) -> Any:
        where = f"{self.address}: {call.path.partition('?')[0]}"
        url = self._base + call.path
        try:
            async with (
                asyncio.timeout(timeout_s),
                # Prompts, and on the same host the key, would go to wherever a server names.
                self._session.request(call.verb, url, allow_redirects=False, **_content(call)) as answer,
            ):
                if 300 <= answer.status < 400:
                    raise ConfigError(
                        f"inference_model.servers: {where} answers with a redirect to "
                        f"{answer.headers.get('Location', 'nowhere')}, which is not followed, because "
                        "prompts would go there; write the address of the server itself"
                    )
                if answer.status == 401:
                    raise ConfigError(
                        f"inference_model.servers: {self.address} refuses the key; set "
                        f"{self._key_variable} to the key that the server was started with"
                    )
                content = await read_body(answer, call.most_bytes)
                if answer.status != 200 and not (call.may_be_refused and answer.status == 400):
                    text = content[:2000].decode(errors="replace").strip()
                    raise ServerLost(f"{where} answered {answer.status} {answer.reason}: {text[:500]}")
                if call.answer is not None:
                    return msgspec.json.decode(content, type=call.answer)
                # Some routes answer with a sentence or with nothing.
                return json.loads(content) if answer.content_type == _JSON else None
        except TimeoutError as error:
            raise ServerLost(f"{where}: no answer within {timeout_s:g} s") from error
        except BodyTooLong as error:
            raise ServerLost(f"{where}: its answer is {error}") from error
        # Lists in lists without end are a RecursionError.
        except (msgspec.DecodeError, json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ServerLost(f"{where} answered with something that is no response: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerLost(f"{where}: {type(error).__name__} {error}".strip()) from error

    def _submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        try:
            return self._loop.submit(work)
        except LoopClosed as error:
            raise ServerLost(f"the connection to {self.address} is closed") from error

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        try:
            return self._submit(work).result()
        except CancelledError as error:
            raise ServerLost(f"the connection to {self.address} was closed") from error

    def close(self) -> None:
        """Close the connection; requests under way end with an exception.

        Any thread may call it but that of the connections.
        """
        self._loop.close(self._shut())

    async def _shut(self) -> None:
        await self._session.close()


def _content(call: Call) -> dict[str, Any]:
    if call.body is None:
        return {}
    return {"data": msgspec.json.encode(call.body), "headers": {"Content-Type": _JSON}}
