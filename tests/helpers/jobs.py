"""Jobs for worker processes: one that hangs, one that holds the interpreter's lock, one that dies, ..."""

from __future__ import annotations

import os
import threading
from typing import Any


def hang(payload: Any) -> float:
    """Answers, but for payloads that say otherwise."""
    answer = payload["answer"]
    if answer == "hang":
        threading.Event().wait()
    if answer == "spin":
        return float(9 ** (9**9))  # one C call that never gives the interpreter's lock back
    if answer == "die":
        os._exit(7)
    if answer == "raise":
        raise ZeroDivisionError("the job's own error")
    if answer == "print":
        print("noise on stdout", flush=True)
    if answer == "pid":
        return float(os.getpid())
    return 1.0


#: What one call may try to leave to the next.
kept: list[int] = []


def run_code(payload: Any) -> float:
    """Runs the answer as code. It is worth what the code calls ``value``, and each call counts itself."""
    kept.append(1)
    names: dict[str, Any] = {"value": 0.0, "calls": len(kept)}
    exec(payload["answer"], names)
    value: float = names["value"]
    return value
