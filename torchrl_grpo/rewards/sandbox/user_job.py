"""Job of the workers of a user's reward: load the function once, and call it. It runs in worker processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrl_grpo.data.example import Example
from torchrl_grpo.rewards.sandbox import user_reward
from torchrl_grpo.runtime import user_code

# The function of this process, and how it is called.
_loaded: list[tuple[Any, user_reward.CallForm]] = []


def prepare(setup: dict[str, Any]) -> None:
    """Load the function.

    Args:
        setup: fields of an :class:`~torchrl_grpo.rewards.sandbox.user_reward.UserRewardSpec`.

    Raises:
        ConfigError: see :meth:`~torchrl_grpo.rewards.sandbox.user_reward.UserRewardSpec.load`.
        UserCodeError: the object of a class cannot be created.
    """
    spec = user_reward.UserRewardSpec(**setup)
    target, form = spec.load()
    _loaded.append((user_code.call(user_code.with_arguments, target, spec.arguments), form))


def run(payload: dict[str, Any]) -> list[Any]:
    """Score completions.

    Args:
        payload: ``completions``, texts, and ``examples``, the fields of an
            :class:`~torchrl_grpo.data.example.Example` for each.

    Returns:
        What the function returned for each completion.

    Raises:
        UserCodeError: the function raised.
        TypeError: a function of lists returned no list.
        ValueError: it returned a list of another length.
    """
    function, form = _loaded[-1]
    completions: list[str] = payload["completions"]
    examples = [Example(**fields) for fields in payload["examples"]]
    if not form.batched:
        return [_plain(user_code.call(function, *pair)) for pair in zip(completions, examples, strict=True)]
    values = user_code.call(function, **form.select(user_reward.lists(completions, examples)))
    if isinstance(values, (str, Mapping)) or not hasattr(values, "__len__"):
        raise TypeError(f"it returned {type(values).__name__}, not a list of {len(completions)} numbers")
    if len(values) != len(completions):
        raise ValueError(f"for {len(completions)} completions, it returned a list of length {len(values)}")
    return [_plain(value) for value in values]


def _plain(value: Any) -> Any:
    """Turn numbers of numpy and torch into Python's.

    Raises:
        TypeError: it is no number.
    """
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if value is None:
        return value
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        shown = f"the text {value[:80]!r}" if isinstance(value, str) else f"a {type(value).__name__}"
        raise TypeError(f"it returned {shown}, not a number") from error
