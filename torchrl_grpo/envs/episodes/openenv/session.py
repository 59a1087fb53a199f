"""A session with an OpenEnv server: one WebSocket, on which it answers JSON messages one by one.

The server makes an environment for each WebSocket, and drops it when that closes. What it sends is not
trusted: its size, its form and its types are checked here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI
from websockets.sync.client import ClientConnection, connect

_T = TypeVar("_T")
# Longest message of a server, as for the processes of episodes.
_MOST_BYTES = 4 * 2**20
_TEXTS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"')
# Most values in it. In Python, "[]" takes thirty times its length.
_MOST_VALUES = 2**18
# First wait before another attempt to reach a server, in seconds, and the longest one.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 1.0


class SessionLost(Exception):
    """The connection has ended, or the server cannot be reached at the moment."""


class NoRoom(SessionLost):
    """The server has as many sessions as it may have."""


class ServerEnded(Exception):
    """The program that shall serve the environment has ended."""


class ServerError(Exception):
    """The server answered with an error, or with something that is no answer.

    Attributes:
        code: code of the error in OpenEnv's protocol; empty if it has none.
    """

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class Session:
    """A session with a server.

    Args:
        url: address of the server, ``http://...`` or ``https://...``.
        end: time of the monotonic clock at which the attempt to connect is given up.

    Raises:
        SessionLost: the server cannot be reached, or has no room for a session now.
        ServerError: it refuses the session.
    """

    def __init__(self, url: str, end: float) -> None:
        self._entered = contextlib.ExitStack()
        address = f"ws{url.removeprefix('http').rstrip('/')}/ws"
        try:
            self._socket: ClientConnection = self._entered.enter_context(
                connect(
                    address,
                    open_timeout=_left(end, url),
                    close_timeout=1.0,
                    max_size=_MOST_BYTES,
                    # A few bytes could become many.
                    compression=None,
                    proxy=None if is_local(url) else True,
                )
            )
        except (OSError, InvalidHandshake, ConnectionClosed, EOFError) as error:
            raise SessionLost(f"{url} cannot be reached: {_text(error)}") from error
        except InvalidURI as error:
            raise ServerError(f"{url} is no address of a server: {error}") from error
        self._url = url
        try:
            # A server that makes no session says so only now.
            self.ask("state", None, end)
        except ServerError as error:
            if error.code == "EXECUTION_ERROR":
                # There is a session, and its environment has no state yet.
                return
            self.close()
            if error.code == "CAPACITY_REACHED":
                raise NoRoom(f"{url} has no room for another session ({error})") from error
            raise
        except TimeoutError as error:
            self.close()
            raise SessionLost(str(error)) from error
        except BaseException:
            self.close()
            raise

    def ask(self, kind: str, data: dict[str, Any] | None, end: float) -> dict[str, Any]:
        """Send a message and return the data of the answer.

        Args:
            kind: ``reset``, ``step`` or ``state``.
            data: parameters of the reset, or the action.
            end: time of the monotonic clock until which the answer must come.

        Raises:
            SessionLost: the connection has ended.
            ServerError: the server answers with an error, with something that is no answer to this message,
                or has sent more than its answers before.
            TimeoutError: the answer does not come in time.
        """
        if kind != "state":
            # A new session begins with it, and a server that refuses one may have sent why already.
            self._check_nothing_unread()
        message = json.dumps({"type": kind} if data is None else {"type": kind, "data": data})
        # A server that refuses a session closes it after it has sent why.
        with contextlib.suppress(ConnectionClosed):
            self._socket.send(message)
        try:
            text = self._socket.recv(_left(end, self._url))
        except ConnectionClosed as error:
            raise SessionLost(f"{self._url} closed the session: {_text(error)}") from error
        except TimeoutError as error:
            raise TimeoutError(f"{self._url} did not answer in time") from error
        answer = _json_object(text, f"the answer to {kind}")
        content = answer.get("data")
        if not isinstance(content, dict):
            raise ServerError(f"the answer to {kind} has no data")
        if answer.get("type") == "error":
            details = content.get("errors")
            text = f"{content.get('message', 'no message')!s:.500}"
            text += f" {details!s:.500}" if details else ""
            raise ServerError(text, str(content.get("code", "")))
        expected = "state" if kind == "state" else "observation"
        if answer.get("type") != expected:
            raise ServerError(
                f"the answer to {kind} is of the type {answer.get('type')!r:.80}, not {expected}"
            )
        return content

    def _check_nothing_unread(self) -> None:
        """Refuse a message that nothing was sent for. It would be taken for the next answer."""
        with contextlib.suppress(ConnectionClosed, TimeoutError):
            text = self._socket.recv(timeout=0)
            raise ServerError(f"{self._url} sent a message that is no answer: {text!r:.80}")

    def close(self) -> None:
        """End the session."""
        with contextlib.suppress(ConnectionClosed, TimeoutError):
            self._socket.send(json.dumps({"type": "close"}))
        self._entered.close()


def open_session(url: str, end: float, process: int | None = None) -> Session:
    """Open a session, and try again until a server is up and has room.

    Args:
        url: address of the server.
        end: time of the monotonic clock at which the attempt is given up.
        process: process id of the server; None if it may be started again, or is somebody else's.

    Raises:
        SessionLost: no session could be opened in time.
        ServerEnded: the process of the server has ended.
        ServerError: the server refuses the session.
    """
    return until(lambda: Session(url, end), end, process)


def until(attempt: Callable[[], _T], end: float, process: int | None = None) -> _T:
    """Repeat an attempt that raises ``SessionLost``; see :func:`open_session`."""
    wait = _FIRST_WAIT_S
    while True:
        try:
            return attempt()
        except SessionLost:
            if process is not None and not _alive(process):
                raise ServerEnded("the command has ended; its output in the log says why") from None
            if time.monotonic() + wait > end:
                raise
            # Nobody tells this process when a server comes up, or when another session ends.
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT_S)


def get_json(url: str, path: str, end: float) -> dict[str, Any]:
    """Return the JSON object of a page of the server.

    Raises:
        SessionLost: the server cannot be reached.
        ServerError: the page is missing, or is no JSON object.
    """
    handlers = [urllib.request.ProxyHandler({})] if is_local(url) else []
    opener = urllib.request.build_opener(*handlers)
    try:
        with opener.open(url.rstrip("/") + path, timeout=_left(end, url)) as page:
            content = page.read(_MOST_BYTES + 1)
    except urllib.error.HTTPError as error:
        raise ServerError(f"{url}{path} answered {error.code}, so it is no OpenEnv server") from error
    except (OSError, ValueError, EOFError) as error:
        raise SessionLost(f"{url} cannot be reached: {_text(error)}") from error
    return _json_object(content, path)


def is_local(url: str) -> bool:
    """Whether an address is this machine's, which no proxy reaches."""
    return urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")


def _marks(text: str) -> int:
    return sum(map(text.count, ",[{"))


def _json_object(text: str | bytes, what: str) -> dict[str, Any]:
    if len(text) > _MOST_BYTES:
        raise ServerError(f"{what} is longer than {_MOST_BYTES} bytes")
    try:
        text = text if isinstance(text, str) else text.decode()
        # Marks inside of texts are no values; they are left out only where there are many.
        if _marks(text) > _MOST_VALUES and _marks(_TEXTS.sub("", text)) > _MOST_VALUES:
            raise ServerError(f"{what} has more than {_MOST_VALUES} values")
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ServerError(f"{what} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ServerError(f"{what} is no JSON object")
    return content


def _left(end: float, url: str) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"{url} did not answer in time")
    return left


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
