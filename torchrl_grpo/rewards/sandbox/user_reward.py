"""Rewards that the user's configuration names: ``reward.functions={NAME: FILE.py:FUNCTION}``.

A function has one of two signatures:

* ``f(completion, example)`` returns a number, or a mapping with ``"score"``
  (:class:`~torchrl_grpo.rewards.types.Reward`);
* ``f(prompts, completions, **columns)`` returns a list of numbers, as in TRL. ``prompts`` has the text of the
  user's last message, ``completions`` the text of each response, and every column of the data set is a list
  of the same length. ``messages`` has the whole prompts, unless the data set has a column of that name.

A function of the second kind may have an attribute ``prompts_per_call``: the largest number of prompts whose
responses it takes in a call. A class may not, because its objects may have a state.

Either may be a coroutine function, or a class whose objects are called in this way. The code runs in
``reward.workers`` processes of its own. A call that takes longer than ``reward.timeout_s`` is ended with its
process; it counts as an error, and the object of a class is created anew.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torchrl_grpo.data.example import Example
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.rewards.sandbox.pool import JobError, WorkerPool
from torchrl_grpo.runtime import user_code

JOB = "torchrl_grpo.rewards.sandbox.user_job:run"


@dataclass(frozen=True)
class UserRewardSpec:
    """A reward as the configuration describes it.

    Attributes:
        name: name of the reward.
        spec: see :func:`~torchrl_grpo.runtime.user_code.load`.
        arguments: keyword arguments of the function or class.
    """

    name: str
    spec: str
    arguments: dict[str, Any]

    @property
    def key(self) -> str:
        """The configuration key, for messages."""
        return f"reward.functions.{self.name}"

    def load(self) -> tuple[Any, CallForm]:
        """Load the function or class and read its signature. No object is created.

        Raises:
            ConfigError: it cannot be loaded, does not take the arguments, or has another signature.
        """
        target = user_code.load(self.spec, self.key)
        user_code.check_arguments(target, self.arguments, f"reward.args.{self.name}")
        bound: frozenset[str] = frozenset()
        called = target
        if inspect.isclass(target):
            if not any("__call__" in vars(base) for base in target.__mro__):
                raise ConfigError(
                    f"{self.key}={self.spec!r}: objects of this class cannot be called; give it a method "
                    "__call__(self, completion, example)"
                )
            called = vars(next(base for base in target.__mro__ if "__call__" in vars(base)))["__call__"]
            bound = frozenset([next(iter(user_code.signature(called, self.key).parameters), "self")])
        else:
            bound = frozenset(self.arguments)
        form = CallForm.read(user_code.signature(called, self.key), bound, self.key)
        most = getattr(target, "prompts_per_call", 1)
        may_join = form.batched and not inspect.isclass(target)
        if type(most) is not int or most < 1 or (most > 1 and not may_join):
            raise ConfigError(
                f"{self.key}={self.spec!r}: its prompts_per_call={most!r} must be a number from 1 on, of a "
                "function f(prompts, completions, **columns) and not of a class; correct it, or leave it out"
            )
        return target, replace(form, prompts_per_call=most)


@dataclass(frozen=True)
class CallForm:
    """How a function is called.

    Attributes:
        names: parameters that a call sets by name.
        required: those without a default.
        any_name: whether it takes any other name too.
        bound: parameters that are set already.
        batched: whether it takes lists of prompts and completions.
        text: the signature, for messages.
        prompts_per_call: largest number of prompts of a call.
    """

    names: frozenset[str]
    required: frozenset[str]
    any_name: bool
    bound: frozenset[str]
    batched: bool
    text: str
    prompts_per_call: int = 1

    @classmethod
    def read(cls, signature: inspect.Signature, bound: frozenset[str], key: str) -> CallForm:
        """Read a signature of which the parameters ``bound`` are set already.

        Raises:
            ConfigError: it is neither of the two that a reward may have.
        """
        free = {name: param for name, param in signature.parameters.items() if name not in bound}
        named = {
            n: param
            for n, param in free.items()
            if param.kind in (param.POSITIONAL_OR_KEYWORD, param.KEYWORD_ONLY)
        }
        form = cls(
            names=frozenset(named),
            required=frozenset(name for name, param in named.items() if param.default is param.empty),
            any_name=any(param.kind is param.VAR_KEYWORD for param in free.values()),
            bound=bound,
            batched="completions" in named,
            text=str(signature),
        )
        if not form.batched and not _takes_two(signature.replace(parameters=list(free.values()))):
            raise ConfigError(
                f"{key}: a reward cannot have the signature {signature}; write f(completion, example) or "
                "f(prompts, completions, **columns)"
            )
        return form

    def select(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of ``columns`` that a call passes."""
        takes = columns.keys() - self.bound if self.any_name else self.names
        return {name: values for name, values in columns.items() if name in takes}

    def check_columns(self, example: Example, spec: UserRewardSpec) -> None:
        """Check that a data set has the columns that the function needs.

        Raises:
            ConfigError: one is missing.
        """
        missing = sorted(self.required - lists([""], [example]).keys()) if self.batched else []
        if missing:
            have = ", ".join(example.columns) or "none"
            raise ConfigError(
                f"{spec.key}={spec.spec!r}: {self.text} needs {', '.join(missing)}, which is no column of "
                f"{example.id} (columns: {have}); rename the parameter, or set it in reward.args.{spec.name}"
            )


def _takes_two(signature: inspect.Signature) -> bool:
    """Whether a function takes a completion and an example by position."""
    try:
        signature.bind("completion", "example")
    except TypeError:
        return False
    # A function of prompts and responses would be called with other things than it expects.
    return next(iter(signature.parameters)) not in ("prompt", "prompts")


def lists(completions: Sequence[str], examples: Sequence[Example]) -> dict[str, Any]:
    """Return what a function of the second signature may be passed: a list per name."""
    names = dict.fromkeys(name for example in examples for name in example.columns)
    return {
        "messages": [example.messages for example in examples],
        **{name: [example.columns.get(name) for example in examples] for name in names},
        "prompts": [example.messages[-1]["content"] for example in examples],
        "completions": list(completions),
    }


class UserReward:
    """A reward of the user that scores one completion at a time.

    Args:
        spec: the reward.
        timeout_s: time limit of a call in seconds.
        workers: number of processes.

    Raises:
        ConfigError: the reward cannot be created in its own process.
    """

    def __init__(self, spec: UserRewardSpec, timeout_s: float, workers: int) -> None:
        self.name = spec.name
        label = f"{spec.key}={spec.spec}"
        self._pool = WorkerPool(JOB, workers, timeout_s, label=label, setup=asdict(spec), max_bytes=None)
        try:
            # Before the first round, and with the patience that imports need.
            self._pool.wait_until_started()
        except JobError as error:
            raise ConfigError(
                f"{error}; it runs in a process without a GPU; correct it, or reward.args.{spec.name}"
            ) from error

    def __call__(self, completion: str, example: Example) -> float | Mapping[str, float]:
        """Score one completion.

        Raises:
            JobTimeout: the function took too long.
            JobError: the function raised, or its process died.
        """
        return self._score([completion], [example])[0]

    def close(self) -> None:
        """End the processes."""
        self._pool.close()

    def _score(
        self, completions: Sequence[str], examples: Sequence[Example]
    ) -> list[float | Mapping[str, float]]:
        result: list[float | Mapping[str, float]] = self._pool.call(
            {"completions": list(completions), "examples": [example.plain() for example in examples]}
        )
        return result


class UserBatchReward(UserReward):
    """A reward of the user that scores lists of completions.

    Args:
        spec: the reward.
        timeout_s: time limit of a call in seconds.
        workers: number of processes.
        prompts_per_call: largest number of prompts that the completions of a call may answer.

    Raises:
        ConfigError: see :class:`UserReward`.
    """

    def __init__(self, spec: UserRewardSpec, timeout_s: float, workers: int, prompts_per_call: int) -> None:
        super().__init__(spec, timeout_s, workers)
        self.prompts_per_call = prompts_per_call

    def score_batch(
        self, completions: Sequence[str], examples: Sequence[Example]
    ) -> list[float | Mapping[str, float]]:
        """Score completions in one call of the function.

        Raises:
            JobTimeout: the function took too long.
            JobError: the function raised or returned no list of this length, or its process died.
        """
        return self._score(completions, examples)


def build(spec: UserRewardSpec, timeout_s: float, workers: int) -> UserReward | UserBatchReward:
    """Check a reward and start its processes.

    Args:
        spec: the reward.
        timeout_s: time limit of a call in seconds.
        workers: number of processes.

    Raises:
        ConfigError: see :meth:`UserRewardSpec.load`; or the reward cannot be created.
    """
    _, form = spec.load()
    if not form.batched:
        return UserReward(spec, timeout_s, workers)
    return UserBatchReward(spec, timeout_s, workers, form.prompts_per_call)
