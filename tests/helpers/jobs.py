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
