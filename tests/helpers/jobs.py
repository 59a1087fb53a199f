"""Jobs for worker processes: one that hangs, one that holds the interpreter's lock, one that dies, ..."""

from __future__ import annotations

import functools
import os
import threading
from typing import Any

from torchrl_grpo.rewards.sandbox import no_code


def prepare(setup: Any) -> None:
    """Never ends, for a setup that says so."""
    if setup == "hang":
        threading.Event().wait()


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


class Refused(BaseException):
    """Code of an answer was about to run. It is no ``Exception``, which scorers catch."""


_ready_tasks: set[str] = set()
_is_judging = False


@functools.cache
def _watch_code() -> None:
    def refuse() -> None:
        if _is_judging:
            raise Refused

    no_code.forbid(refuse)


def score_watched(payload: Any) -> float | str:
    """Scores an answer of ``reasoning_gym`` in this process, which refuses code and stays for the next one.

    A task that is new gets ready first, as the worker of a task does at its start, but from one answer: what
    a scorer imports, it imports for the first one.
    """
    from torchrl_grpo.rewards.sandbox import gym_job  # which imports all tasks

    global _is_judging
    _watch_code()
    task = payload["truth"]["task"]
    if task not in _ready_tasks:
        _ready_tasks.add(task)
        gym_job._LEARNING_ANSWERS = 1
        gym_job.prepare({"task": task, "args": payload["truth"]["args"]})
    _is_judging = True
    try:
        return gym_job.run(payload)
    except Refused:
        return 0.0
    except Exception as error:  # noqa: BLE001  as of a worker
        return repr(error)
    finally:
        _is_judging = False
