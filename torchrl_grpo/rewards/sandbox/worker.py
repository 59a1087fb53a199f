"""Program of a worker process. It reads one JSON request per line and writes one JSON reply per line.

    python -m torchrl_grpo.rewards.sandbox.worker SOCKET MODULE:FUNCTION ISOLATION MAX_BYTES

A request with ``job`` calls the function, which returns a JSON-serializable value. ``ISOLATION`` says where
(:class:`Isolation`). A request with ``setup`` calls the function ``prepare`` of the same module, in the
worker itself: it makes what all later calls need, and sees nothing that a model wrote.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import socket
import sys
from enum import StrEnum
from typing import Any

from torchrl_grpo.rewards.sandbox import judged_apart
from torchrl_grpo.runtime.json_channel import READY, attempt, line


class Isolation(StrEnum):
    """Where a worker runs its function."""

    #: In the worker itself. What one call leaves behind, the next one sees.
    none = "none"
    #: Each call in a copy of the worker, which ends with the call.
    process = "process"
    #: The same, and the copy has no files, no network and no other processes.
    sandbox = "sandbox"


def main(number: int, target: str, isolation: Isolation, max_bytes: int) -> None:
    """Serve requests until the parent closes the socket.

    Args:
        number: file descriptor of the socket.
        target: ``"module:function"``.
        isolation: where the function runs.
        max_bytes: limit of the address space; 0 for no limit.
    """
    if max_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))
    module, _, name = target.partition(":")
    loaded: list[Any] = []
    with socket.socket(fileno=number) as own, own.makefile("r", encoding="utf-8") as requests:
        own.sendall(line(READY, attempt(lambda: loaded.append(importlib.import_module(module)))))
        if isolation is not Isolation.none:
            # Nothing of it is a secret, but copies of this process need nothing of it either.
            os.environ.clear()
        copies = judged_apart.Copies(
            lambda job: getattr(loaded[0], name)(job), sandboxed=isolation is Isolation.sandbox
        )
        for text in requests:
            request = json.loads(text)
            payload = request["payload"]
            if "setup" in payload:
                reply = attempt(lambda: loaded[0].prepare(payload["setup"]))  # noqa: B023
                # A collection in a copy of this process would copy the memory of all that there is.
                gc.collect()
                gc.freeze()
                copies.discard()
            elif isolation is Isolation.none:
                reply = attempt(lambda: getattr(loaded[0], name)(payload["job"]))  # noqa: B023
            else:
                reply = copies.run(payload["job"], request["limit_s"])
            own.sendall(line(request["id"], reply))
            if isolation is not Isolation.none:
                # After the reply, so that nobody waits for it.
                with contextlib.suppress(OSError):
                    copies.make_ready()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Isolation(sys.argv[3]), int(sys.argv[4]))
