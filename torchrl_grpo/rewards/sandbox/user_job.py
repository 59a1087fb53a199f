"""Job of the workers of a user's reward: load the function once, and call it. It runs in worker processes."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_grpo.data.example import Example
from torchrl_grpo.rewards.sandbox import own
from torchrl_grpo.runtime import user_code

# The function of this process and its configuration key.
_loaded: list[tuple[Any, str]] = []


def run(payload: dict[str, Any]) -> list[float | dict[str, float]] | None:
    """Load the function that ``payload["spec"]`` names, or score ``payload["completions"]``.

    Args:
        payload: either ``name``, ``spec`` and ``arguments``; or ``completions``, texts, and ``examples``, the
            fields of an :class:`~torchrl_grpo.data.example.Example` for each.

    Returns:
        One number or mapping of numbers per completion; None after loading.

    Raises:
        TypeError: the function returned something else.
        ValueError: the function returned a list of another length.
    """
    if "spec" in payload:
        key = f"reward.functions.{payload['name']}"
        found = user_code.load(payload["spec"], key)
        _loaded.append((user_code.with_arguments(found, payload["arguments"], key), key))
        return None
    function, key = _loaded[-1]
    completions: list[str] = payload["completions"]
    examples = [Example(**fields) for fields in payload["examples"]]
    if own.is_batched(function, key):
        values = _finished(function(**_lists(function, completions, examples)))
        if isinstance(values, (str, Mapping)) or not hasattr(values, "__len__"):
            raise TypeError(f"it returned {type(values).__name__}, not a list of {len(completions)} numbers")
        if len(values) != len(completions):
            raise ValueError(f"it returned {len(values)} numbers for {len(completions)} completions")
        return [_plain(value) for value in values]
    return [
        _plain(_finished(function(completion, example)))
        for completion, example in zip(completions, examples, strict=True)
    ]


def _lists(function: Any, completions: list[str], examples: Sequence[Example]) -> dict[str, Any]:
    names = dict.fromkeys(name for example in examples for name in example.columns)
    columns = {
        "messages": [example.messages for example in examples],
        **{name: [example.columns.get(name) for example in examples] for name in names},
        "prompts": [example.messages[-1]["content"] for example in examples],
        "completions": completions,
    }
    return own.columns_for(inspect.signature(function), columns)


def _finished(result: Any) -> Any:
    async def wait() -> Any:
        return await result

    return asyncio.run(wait()) if inspect.isawaitable(result) else result


def _plain(value: Any) -> float | dict[str, float]:
    """Turn numbers of numpy and torch into Python's."""
    if isinstance(value, Mapping):
        return {str(name): float(part) for name, part in value.items()}
    if isinstance(value, str) or value is None:
        raise TypeError(f"it returned {value!r}, not a number")
    return float(value)
