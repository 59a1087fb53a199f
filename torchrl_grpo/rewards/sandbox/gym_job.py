"""Job of the reasoning_gym worker: call the task's own scorer. It runs in a worker process only."""

from __future__ import annotations

import json
import re
import time
from typing import Any

from torchrl_grpo.data import gym_library  # noqa: F401  (takes seconds, which the first job must not pay)
from torchrl_grpo.data import reasoning_gym as tasks
from torchrl_grpo.data.rows import codec

# A worker scores so many answers at its start, but for no longer than this.
_LEARNING_ANSWERS, _LEARNING_S = 16, 1.0

# Their scorers look for the given numbers anywhere in the text, comments and quotes included.
_ARITHMETIC_GAMES = ("countdown", "puzzle24")
_ARITHMETIC = re.compile(r"(?:[0-9+\-/().\s]|\*(?!\*))*")

_scorers: dict[str, Any] = {}


def prepare(setup: dict[str, Any]) -> None:
    """Make the scorer of a task, and let it score answers of the task's own.

    Both take long the first time: tables are read, and sympy imports modules and fills its caches.

    Args:
        setup: mapping with ``task`` and ``args``.
    """
    scorer = _scorer(setup["task"], setup["args"])
    end = time.monotonic() + _LEARNING_S
    for entry in tasks.make(setup["task"], setup["args"], seed=0, size=_LEARNING_ANSWERS):
        scorer.score_answer(str(entry["answer"]), entry)
        if time.monotonic() > end:
            break


def run(payload: dict[str, Any]) -> float:
    """Score an answer.

    Args:
        payload: mapping with ``answer`` (text) and ``truth`` (see :mod:`torchrl_grpo.data.reasoning_gym`).

    Returns:
        Result of the task's ``score_answer``, in [0, 1].
    """
    truth = payload["truth"]
    if truth["task"] in _ARITHMETIC_GAMES and not _ARITHMETIC.fullmatch(payload["answer"]):
        return 0.0
    scorer = _scorer(truth["task"], truth["args"])
    return float(scorer.score_answer(payload["answer"], codec.decode(truth["entry"])))


def _scorer(task: str, args: dict[str, Any]) -> Any:
    key = json.dumps([task, args], sort_keys=True)
    if key not in _scorers:
        _scorers[key] = tasks.make(task, args, seed=0, size=1)
    return _scorers[key]
