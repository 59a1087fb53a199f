"""Rewards that the user's configuration names: ``reward.functions={NAME: FILE.py:FUNCTION}``.

A function has one of two signatures:

* ``f(completion, example)`` returns a number, or a mapping with ``"score"``
  (:class:`~torchrl_grpo.rewards.types.Reward`);
* ``f(prompts, completions, **columns)`` returns a list of numbers, as in TRL. ``prompts`` has the text of the
  user's last message, ``completions`` the text of each response, and every column of the data set is a list
  of the same length. ``messages`` has the whole prompts, unless the data set has a column of that name. A
  call covers at least the responses of one group.

Either may be a coroutine function, or a class whose objects are called in this way. The code runs in
``reward.workers`` processes of its own. A call that takes longer than ``reward.timeout_s`` is ended with its
process; it counts as an error, and the object of a class is created anew.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torchrl_grpo.data.example import Example
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.rewards.sandbox.pool import WorkerPool
from torchrl_grpo.runtime import user_code

JOB = "torchrl_grpo.rewards.sandbox.user_job:run"


def is_batched(function: Any, key: str) -> bool:
    """Return whether a function takes lists of prompts and completions.

    Args:
        function: the user's function, or the object of the user's class.
        key: configuration key that names it, for messages.

    Raises:
        ConfigError: the function has neither of the two signatures.
    """
    signature = inspect.signature(function)
    if "completions" in signature.parameters:
        return True
    try:
        signature.bind("completion", "example")
    except TypeError:
        pass
    else:
        return False
    raise ConfigError(
        f"{key}: a reward cannot have the signature {signature}; write f(completion, example) or "
        "f(prompts, completions, **columns)"
    )


def _takes_any_name(signature: inspect.Signature) -> bool:
    return any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())


def columns_for(signature: inspect.Signature, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of ``columns`` that a function takes."""
    if _takes_any_name(signature):
        return dict(columns)
    return {name: values for name, values in columns.items() if name in signature.parameters}


class OwnReward:
    """A reward of the user that scores one completion at a time.

    Args:
        name: name of the reward.
        spec: see :func:`~torchrl_grpo.runtime.user_code.load`.
        arguments: keyword arguments of the function or class.
        timeout_s: time limit of a call in seconds.
        workers: number of processes.
    """

    def __init__(
        self, name: str, spec: str, arguments: Mapping[str, Any], timeout_s: float, workers: int
    ) -> None:
        self.name = name
        setup = {"name": name, "spec": spec, "arguments": dict(arguments)}
        self._pool = WorkerPool(JOB, workers, timeout_s, setup=setup, max_bytes=None)

    def __call__(self, completion: str, example: Example) -> float | Mapping[str, float]:
        """Score one completion.

        Raises:
            JobTimeout: the function took too long.
            JobError: the function raised, or its process died.
        """
        result: float | dict[str, float] = self._pool.call(
            {"completions": [completion], "examples": [asdict(example)]}
        )[0]
        return result

    def close(self) -> None:
        """End the processes."""
        self._pool.close()


class OwnBatchReward(OwnReward):
    """A reward of the user that scores lists of completions."""

    def score_batch(
        self, completions: Sequence[str], examples: Sequence[Example]
    ) -> list[float | Mapping[str, float]]:
        """Score completions in one call of the function.

        Raises:
            JobTimeout: the function took too long.
            JobError: the function raised or returned no list of this length, or its process died.
        """
        result: list[float | Mapping[str, float]] = self._pool.call(
            {"completions": list(completions), "examples": [asdict(one) for one in examples]}
        )
        return result


def build(
    name: str, spec: str, arguments: Mapping[str, Any], timeout_s: float, workers: int
) -> OwnReward | OwnBatchReward:
    """Load a reward once in this process to check it, and start its processes.

    Raises:
        ConfigError: see :func:`check`.
    """
    kind = OwnBatchReward if check(name, spec, arguments) else OwnReward
    return kind(name, spec, arguments, timeout_s, workers)


def check(name: str, spec: str, arguments: Mapping[str, Any]) -> bool:
    """Load a reward and return whether it is batched.

    Raises:
        ConfigError: the function cannot be loaded, does not take the arguments, or has another signature.
    """
    key = f"reward.functions.{name}"
    found = user_code.load(spec, key)
    function = user_code.with_arguments(found, arguments, f"reward.args.{name}")
    if not callable(function):
        raise ConfigError(
            f"{key}={spec!r}: objects of this class cannot be called; give it a method "
            "__call__(self, completion, example)"
        )
    return is_batched(function, key)
