"""Arguments of :class:`~torchrl_grpo.api.trainer.GRPOTrainer` that do not exist: what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_grpo.config import elsewhere
from torchrl_grpo.config.schema import keys
from torchrl_grpo.errors import ConfigError


def unknown_arguments_error(arguments: Mapping[str, Any], known: Sequence[str]) -> ConfigError:
    """Build the error for arguments that do not exist.

    Args:
        arguments: those that do not exist, at least one.
        known: those that exist.
    """
    advice = "; ".join(f"{name}: {_advice(name, value, known)}" for name, value in arguments.items())
    noun = "argument" if len(arguments) == 1 else "arguments"
    return ConfigError(f"GRPOTrainer has no such {noun}: {advice}")


def _advice(name: str, value: Any, known: Sequence[str]) -> str:
    foreign = elsewhere.find_argument(name)
    if foreign is not None:
        return foreign.advice(name, None)
    book = keys()
    if elsewhere.find(name) is None and (close := difflib.get_close_matches(name, known, n=1, cutoff=0.8)):
        return f"write {close[0]}=... instead"
    if name in book.sections:
        return f"it goes into config, as config={{'{name}': NAME}} or config={{'{name}.KEY': VALUE}}"
    plain = str(value) if isinstance(value, bool | int | float | str) else None
    advice = book.advice(name, plain)
    if not advice.startswith("write "):
        return advice
    key = book.nearest(name)
    return advice if key is None else f"{advice} (in config, as config={{'{key}': ...}})"
