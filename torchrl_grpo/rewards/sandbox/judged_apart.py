"""Judge one answer in a copy of this process that ends with the answer.

Some judges evaluate what a model wrote: sympy's parser and several scorers of ``reasoning_gym`` call
``eval``. So the text may run code. Three things keep it from doing harm:

* The copy gives up files, network, processes and signals (:mod:`torchrl_grpo.runtime.sandbox`), and has no
  environment variables. It can write its own verdict and nothing else.
* It is gone after the answer, with everything that the text may have changed in it.
* Text that does more than to build a value is not run, and its answer is worth 0
  (:mod:`torchrl_grpo.rewards.sandbox.no_code`).

The copy for the next answer is made while the one before is judged. The process that forks has one thread
and no GPU.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchrl_grpo.rewards.sandbox import no_code
from torchrl_grpo.runtime import sandbox, supervised
from torchrl_grpo.runtime.json_channel import (
    ChannelBroken,
    ChannelClosed,
    ChannelTimeout,
    JsonChannel,
    attempt,
)

# Longest verdict in bytes: a number, or the message of an error.
_MOST_BYTES = 2**14
_MOST_CHARACTERS = 1_000
_NO_VERDICT = {"error": "the judge's process wrote something that is no verdict"}
# Processor time of a copy that nobody ends. Its time limit is much shorter.
_MOST_CPU_S = 86_400
# Number of the socket in a copy, which has no other file open.
_SOCKET = 3


class Copies:
    """Copies of this process, each of which judges one answer.

    Args:
        function: judge of a payload, which returns a number.
        sandboxed: whether the copies give up files, network and processes.
    """

    def __init__(self, function: Callable[[Any], float], sandboxed: bool) -> None:
        self._function, self._sandboxed = function, sandboxed
        # The copy that waits for the next answer: its process, and the socket to it.
        self._next: tuple[int, socket.socket] | None = None
        # Copies that were killed and have not been reaped. Their memory takes milliseconds to be freed.
        self._ending: set[int] = set()

    def run(self, payload: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Judge in a copy, and kill it. Answers that are only numbers need none.

        Args:
            payload: argument of the judge, of JSON, with the text ``answer``.
            limit_s: time limit in seconds.

        Returns:
            An answer for :class:`~torchrl_grpo.runtime.json_channel.JsonChannel` without its id.
        """
        end = time.monotonic() + limit_s
        if no_code.is_numbers(payload["answer"]):
            return attempt(lambda: self._function(payload))
        try:
            self.make_ready()
        except OSError as error:
            return {"error": f"no process can be started: {error}"}
        assert self._next is not None
        (copy, own), self._next = self._next, None
        channel = JsonChannel(own.fileno())
        try:
            channel.send_line(json.dumps(payload).encode(), end)
            # While this copy judges. Without a process for the next one, the next call says so.
            with contextlib.suppress(OSError):
                self.make_ready()
            return _checked(channel.read_line(end))
        except ChannelTimeout:
            return {"timeout": True}
        except ChannelBroken:
            return _NO_VERDICT
        except ChannelClosed:
            return {"error": "the judge's process ended without a verdict"}
        finally:
            self._end(copy, own)

    def make_ready(self) -> None:
        """Make a copy for the next answer, if there is none.

        Raises:
            OSError: no process can be started.
        """
        self._ending -= {copy for copy in self._ending if os.waitpid(copy, os.WNOHANG)[0]}
        if self._next is not None:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            copy = os.fork()
            if copy == 0:
                _judge(self._function, theirs, self._sandboxed)
        self._next = copy, ours

    def discard(self) -> None:
        """Kill the copy, if there is one."""
        if self._next is not None:
            (copy, own), self._next = self._next, None
            self._end(copy, own)

    def _end(self, copy: int, own: socket.socket) -> None:
        own.close()
        os.kill(copy, signal.SIGKILL)
        self._ending.add(copy)


def _checked(content: bytes) -> dict[str, Any]:
    """Return the verdict that the copy wrote. Code of a model may have written it, so it is one number."""
    verdict = None
    with contextlib.suppress(ValueError, RecursionError):
        verdict = json.loads(content)
    if isinstance(verdict, dict) and len(content) <= _MOST_BYTES:
        value = verdict.get("value")
        if isinstance(value, float) and math.isfinite(value):
            return {"value": value}
        if "error" in verdict:
            # Without line breaks and control characters, because it goes to the log.
            return {"error": ascii(str(verdict["error"]))[1:-1]}
    return _NO_VERDICT


def _judge(function: Callable[[Any], float], own: socket.socket, sandboxed: bool) -> None:
    """Judge in the copy, write the verdict and end. It never returns."""
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        os.dup2(own.fileno(), _SOCKET)
        os.closerange(_SOCKET + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        supervised.die_with_parent()
        # If the memory runs out, this process goes first.
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
        # A collection would copy the memory of all that has been imported.
        gc.disable()
        if sandboxed:
            memory, _ = resource.getrlimit(resource.RLIMIT_AS)
            sandbox.limit(memory, _MOST_CPU_S, max_file_bytes=0)
            sandbox.restrict(None)
        with os.fdopen(os.dup(_SOCKET), "rb") as requests:
            payload = json.loads(requests.readline())
        no_code.forbid(lambda: _leave({"value": 0.0}))
        _leave(attempt(lambda: function(payload)))
    finally:
        os._exit(1)


def _leave(reply: dict[str, Any]) -> None:
    if "error" in reply:
        reply = {"error": reply["error"][:_MOST_CHARACTERS]}
    # Reading the judge's value as a number is part of judging, because it may be any object.
    reply = attempt(lambda: float(reply["value"])) if "value" in reply else reply
    os.write(_SOCKET, json.dumps(reply).encode() + b"\n")
    os._exit(0)
