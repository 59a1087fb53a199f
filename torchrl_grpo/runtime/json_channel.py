"""Ask a process by JSON lines over two file descriptors, with a time limit for each answer."""

from __future__ import annotations

import json
import os
import selectors
import time
from typing import Any


class ChannelClosed(Exception):
    """The other process has ended or has closed its side."""


class ChannelTimeout(Exception):
    """The answer did not come in time."""


class RemoteError(Exception):
    """The function of the other process raised. The message is that of its error."""


class JsonChannel:
    """Requests to one process, which answers them one by one. One thread uses it at a time.

    Args:
        reads: file descriptor that the answers come from.
        writes: file descriptor that the requests go to.
    """

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes = reads, writes
        self._buffer = b""

    def ask(self, payload: Any, limit_s: float) -> Any:
        """Send a JSON-serializable request and return its answer.

        Raises:
            RemoteError: the other process reports an error.
            ChannelTimeout: there is no answer within ``limit_s`` seconds.
            ChannelClosed: the process has ended.
        """
        # The other process's own limit is for the case that this one is gone.
        rest = json.dumps({"payload": payload, "limit_s": limit_s + 5.0}).encode() + b"\n"
        try:
            while rest:
                rest = rest[os.write(self._writes, rest) :]
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed from error
        return self.answer(limit_s)

    def answer(self, limit_s: float) -> Any:
        """Wait for an answer. See :meth:`ask`."""
        reply = json.loads(self._read_line(limit_s))
        if "error" in reply:
            raise RemoteError(reply["error"])
        return reply["value"]

    def _read_line(self, limit_s: float) -> bytes:
        end = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._reads, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise ChannelTimeout
                try:
                    chunk = os.read(self._reads, 65_536)
                except ConnectionResetError as error:
                    raise ChannelClosed from error
                if not chunk:
                    raise ChannelClosed
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line
