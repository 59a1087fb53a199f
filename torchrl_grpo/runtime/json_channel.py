"""Ask a process by JSON lines over a socket, with one time limit for a request and its answer.

The other process may run code of the user, or judge what a model wrote. It may stop, never read, or write
without end and without being asked. Nothing of that makes a call last longer than its limit.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import time
from typing import Any

# A longer answer is not read. Reading the JSON of one takes a fraction of a second.
_MOST_BYTES = 4 * 2**20
_CHUNK = 2**18
# Name of the message that a process sends when it has started, and that answers no request.
READY = "ready"


class ChannelClosed(Exception):
    """The other process has ended or has closed its side."""


class ChannelBroken(ChannelClosed):
    """The other process wrote something that is no answer. It must be ended."""


class ChannelTimeout(Exception):
    """The answer did not come in time."""


class RemoteError(Exception):
    """The function of the other process raised. The message is that of its error."""


class RemoteTimeout(Exception):
    """The other process reports that it has ended the function, which took too long."""


class JsonChannel:
    """Requests to one process, which answers them one by one. One thread uses it at a time.

    A request is one line, ``{"id": ..., "payload": ..., "limit_s": ...}``. So is its answer, which repeats
    the id: ``{"id": ..., "value": ...}``, ``{"id": ..., "error": ...}`` or ``{"id": ..., "timeout": true}``.
    The id is random. Lines with another id are dropped: code in the other process may have written them.

    Args:
        descriptor: file descriptor of a socket to the process. It becomes non-blocking.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        os.set_blocking(descriptor, False)
        self._buffer = bytearray()

    def ask(self, payload: Any, limit_s: float, grace_s: float = 0.0) -> Any:
        """Send a JSON-serializable request and return its answer.

        Args:
            payload: the request.
            limit_s: time limit in seconds, which the other process is told.
            grace_s: seconds after the limit in which the other process may report that it has ended the
                function.

        Raises:
            RemoteError: the other process reports an error.
            RemoteTimeout: it reports that the function took too long.
            ChannelTimeout: the request cannot be written, or not answered, in ``limit_s + grace_s`` seconds.
            ChannelClosed: the process has ended.
            ChannelBroken: it wrote something that is no answer.
        """
        end = time.monotonic() + limit_s + grace_s
        name = secrets.token_hex(8)
        request = {"id": name, "payload": payload, "limit_s": limit_s}
        self.send_line(json.dumps(request).encode(), end)
        return self._answer(name, end)

    def send_line(self, content: bytes, end: float) -> None:
        """Send a line until a time of the monotonic clock. See :meth:`ask`."""
        rest = memoryview(content + b"\n")
        with selectors.DefaultSelector() as selector:
            selector.register(self._descriptor, selectors.EVENT_WRITE)
            while rest:
                _wait(selector, end)
                try:
                    rest = rest[os.write(self._descriptor, rest) :]
                except BlockingIOError:
                    continue
                except (BrokenPipeError, ConnectionResetError) as error:
                    raise ChannelClosed from error

    def wait_until_ready(self, limit_s: float) -> None:
        """Wait for the message of the process that it has started. See :meth:`ask`."""
        self._answer(READY, time.monotonic() + limit_s)

    def _answer(self, name: str, end: float) -> Any:
        start = b'{"id": ' + json.dumps(name).encode()
        while not (text := self.read_line(end)).startswith(start):
            # It is not even parsed, which takes long for a line made to take long.
            continue
        try:
            reply = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ChannelBroken("it wrote something that is no JSON") from error
        if "error" in reply:
            raise RemoteError(str(reply["error"]))
        if "timeout" in reply:
            raise RemoteTimeout
        return reply.get("value")

    def read_line(self, end: float) -> bytes:
        """Return the next line, which comes until a time of the monotonic clock. See :meth:`ask`."""
        searched = 0
        with selectors.DefaultSelector() as selector:
            selector.register(self._descriptor, selectors.EVENT_READ)
            while (newline := self._buffer.find(b"\n", searched)) < 0:
                searched = len(self._buffer)
                if searched > _MOST_BYTES:
                    raise ChannelBroken(f"it wrote an answer of more than {_MOST_BYTES} bytes")
                _wait(selector, end)
                try:
                    chunk = os.read(self._descriptor, _CHUNK)
                except BlockingIOError:
                    continue
                except ConnectionResetError as error:
                    raise ChannelClosed from error
                if not chunk:
                    raise ChannelClosed
                self._buffer += chunk
        line = bytes(self._buffer[:newline])
        del self._buffer[: newline + 1]
        return line


def _wait(selector: selectors.BaseSelector, end: float) -> None:
    """Wait until the only file of ``selector`` is ready. The limit also holds while it always is."""
    left = end - time.monotonic()
    if left <= 0 or not selector.select(left):
        raise ChannelTimeout


def attempt(job: Any) -> dict[str, Any]:
    """Return the value of a job, or the error that it raised, as an answer without its id."""
    try:
        return {"value": job()}
    except BaseException as error:  # noqa: BLE001  the process that asked raises it
        return {"error": f"{type(error).__name__}: {error}"}


def line(name: str, answer: dict[str, Any]) -> bytes:
    """Return the line of an answer. A value that is not JSON becomes an error."""
    try:
        content = json.dumps({"id": name, **answer})
    except (TypeError, ValueError, RecursionError) as error:
        content = json.dumps({"id": name, "error": f"the result is not JSON: {error}"})
    return content.encode() + b"\n"
