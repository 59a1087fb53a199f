"""Job of the reasoning_gym worker: call the task's own scorer. It runs in a worker process only."""

from __future__ import annotations

import json
from typing import Any

from torchrl_grpo.data import gym_library  # noqa: F401  (takes seconds, which the first job must not pay)
from torchrl_grpo.data import reasoning_gym as tasks
from torchrl_grpo.data.rows import codec

_scorers: dict[str, Any] = {}


def run(payload: dict[str, Any]) -> float:
    """Score an answer.

    Args:
        payload: mapping with ``answer`` (text) and ``truth`` (see :mod:`torchrl_grpo.data.reasoning_gym`).

    Returns:
        Result of the task's ``score_answer``, in [0, 1].
    """
    truth = payload["truth"]
    key = json.dumps([truth["task"], truth["args"]], sort_keys=True)
    if key not in _scorers:
        _scorers[key] = tasks.make(truth["task"], truth["args"], seed=0, size=1)
    return float(_scorers[key].score_answer(payload["answer"], codec.decode(truth["entry"])))
