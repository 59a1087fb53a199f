"""Program of a worker process. It reads one JSON request per line and writes one JSON reply per line.

    python -m torchrl_grpo.rewards.sandbox.worker MODULE:FUNCTION MAX_BYTES

The function takes the request's ``payload`` and returns a JSON-serializable value. A job that exceeds the
request's ``limit_s`` seconds kills the process by a signal that no Python code handles. This works even if
the parent is gone or the job holds the GIL. The parent has its own time limit (pool.py) and does not depend
on this one.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from typing import Any


def main(target: str, max_bytes: int) -> None:
    """Serve requests until the input ends.

    Args:
        target: ``"module:function"``.
        max_bytes: limit of the address space; 0 for no limit.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    # What a job prints or reads must not mix with replies and requests. stderr is written line by line, and
    # this process always ends by a signal.
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout = sys.stderr
    if max_bytes and sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))
    module, _, name = target.partition(":")
    send(replies, {"ready": True, **attempt(lambda: importlib.import_module(module) and None)})
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for line in requests:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["limit_s"])
        reply = attempt(lambda: getattr(importlib.import_module(module), name)(request["payload"]))  # noqa: B023
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(replies, reply)


def attempt(job: Any) -> dict[str, Any]:
    """Return the value of a job, or the error that it raised, as a reply."""
    try:
        return {"value": job()}
    except BaseException as error:  # noqa: BLE001  the parent raises it
        return {"error": f"{type(error).__name__}: {error}"}


def send(replies: Any, reply: dict[str, Any]) -> None:
    """Write a reply as one line of JSON."""
    try:
        line = json.dumps(reply)
    except (TypeError, ValueError) as error:
        line = json.dumps({"error": f"the result is not JSON: {error}"})
    replies.write(line + "\n")
    replies.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
