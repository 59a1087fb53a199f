"""Judge one answer in a copy of this process that ends with the answer.

Some judges evaluate what a model wrote: sympy's parser and several scorers of ``reasoning_gym`` call
``eval``. So the text may run code. Three things keep it from doing harm:

* The copy gives up files, network, processes and signals (:mod:`torchrl_grpo.runtime.sandbox`), and has no
  environment variables. It can write its own verdict and nothing else.
* It is gone after the answer, with everything that the text may have changed in it.
* Text that does more than to build a value is not run, and its answer is worth 0
  (:mod:`torchrl_grpo.rewards.sandbox.no_code`).

A copy is ready in milliseconds and has everything imported. The process that forks has one thread and no GPU.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from typing import Any

from torchrl_grpo.rewards.sandbox import no_code
from torchrl_grpo.runtime import sandbox, supervised
from torchrl_grpo.runtime.json_channel import attempt

# Longest verdict in bytes: a number, or the message of an error.
_MOST_BYTES = 2**14
_MOST_CHARACTERS = 1_000


def run(function: Callable[[Any], float], payload: Any, limit_s: float, sandboxed: bool) -> dict[str, Any]:
    """Run a judge in a copy of this process.

    Args:
        function: judge of ``payload``, which returns a number.
        payload: its argument.
        limit_s: time limit in seconds.
        sandboxed: whether the copy gives up files, network and processes.

    Returns:
        An answer for :class:`~torchrl_grpo.runtime.json_channel.JsonChannel` without its id.
    """
    end = time.monotonic() + limit_s
    reads, writes = os.pipe()
    try:
        copy = os.fork()
    except OSError as error:
        os.close(reads)
        os.close(writes)
        return {"error": f"no process can be started: {error}"}
    if copy == 0:
        _judge(function, payload, writes, math.ceil(limit_s) + 1, sandboxed)
    os.close(writes)
    try:
        content = _read(reads, end)
    finally:
        os.close(reads)
        os.kill(copy, signal.SIGKILL)
        _, status = os.waitpid(copy, 0)
    if content is None:
        return {"timeout": True}
    return _checked(content, os.waitstatus_to_exitcode(status))


def _read(reads: int, end: float) -> bytes | None:
    """Return what the copy writes until it ends, at most a little too much; None after the time limit."""
    content = b""
    # Not select(), which takes no number above 1,023.
    poll = select.poll()
    poll.register(reads, select.POLLIN)
    while len(content) <= _MOST_BYTES:
        left = end - time.monotonic()
        if left <= 0 or not poll.poll(math.ceil(left * 1_000)):
            return None
        chunk = os.read(reads, _MOST_BYTES)
        if not chunk:
            break
        content += chunk
    return content


def _checked(content: bytes, exit_code: int) -> dict[str, Any]:
    """Return the verdict that the copy wrote. Code of a model may have written it, so it is one number."""
    if not content:
        return {"error": f"the judge's process ended without a verdict (exit code {exit_code})"}
    verdict = None
    with contextlib.suppress(ValueError, RecursionError):
        verdict = json.loads(content)
    if isinstance(verdict, dict) and len(content) <= _MOST_BYTES:
        value = verdict.get("value")
        if isinstance(value, float) and math.isfinite(value):
            return {"value": value}
        if "error" in verdict:
            return {"error": str(verdict["error"])}
    return {"error": "the judge's process wrote something that is no verdict"}


def _judge(
    function: Callable[[Any], float], payload: Any, writes: int, cpu_seconds: int, sandboxed: bool
) -> None:
    """Judge in the copy, write the verdict and end. It never returns."""
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        verdict = os.dup2(writes, 3)
        os.closerange(4, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        supervised.die_with_parent()
        no_code.forbid(lambda: _leave(verdict, {"value": 0.0}))
        memory, _ = resource.getrlimit(resource.RLIMIT_AS)
        if sandboxed:
            sandbox.limit(memory, cpu_seconds, max_file_bytes=0)
            sandbox.restrict(None)
        _leave(verdict, attempt(lambda: function(payload)))
    finally:
        os._exit(1)


def _leave(verdict: int, reply: dict[str, Any]) -> None:
    if "error" in reply:
        reply = {"error": reply["error"][:_MOST_CHARACTERS]}
    # Reading the judge's value as a number is part of judging, because it may be any object.
    reply = attempt(lambda: float(reply["value"])) if "value" in reply else reply
    os.write(verdict, json.dumps(reply).encode())
    os._exit(0)
