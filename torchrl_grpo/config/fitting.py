"""Write a value that a user gave elsewhere, or without its brackets, as a key of a certain type takes it."""

from __future__ import annotations

import types
import typing
from enum import EnumType
from typing import Any

from torchrl_grpo.runtime import user_code

_TRUTHS = {"true": "true", "yes": "true", "on": "true", "1": "true"}
_TRUTHS |= {"false": "false", "no": "false", "off": "false", "0": "false"}
_NOTHING = ("null", "none")


def fitting(hint: Any, value: str) -> str | None:
    """Return a value as a key of this type takes it on the command line; None if it is of another type.

    Args:
        hint: type of the key.
        value: value as the user wrote it. A list or a mapping may lack its brackets, and entries their names.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    plain = value.lower()
    if origin in (typing.Union, types.UnionType):
        if type(None) in arguments and plain in _NOTHING:
            return "null"
        options = (fitting(option, value) for option in arguments if option is not type(None))
        return next((option for option in options if option is not None), None)
    if isinstance(hint, EnumType):
        return next((name for name in (value, plain) if name in hint.__members__), None)
    if hint is bool:
        return _TRUTHS.get(plain)
    if hint in (int, float):
        try:
            hint(value)
        except ValueError:
            return None
        return value
    if origin is list:
        items = "" if plain in _NOTHING else value.removeprefix("[").removesuffix("]")
        parts = [fitting(arguments[0], item.strip()) for item in items.split(",") if item]
        return f"[{items}]" if None not in parts else None
    if origin is dict:
        return "{}" if plain in _NOTHING else _mapping(value, arguments[1])
    return None if hint is str and plain in ("true", "false") else value


def _mapping(value: str, hint: Any) -> str | None:
    if value.startswith("{"):
        return value
    items = value.removeprefix("[").removesuffix("]")
    entries = ["" if "{" in items else _entry(item.strip(), hint) for item in items.split(",")]
    return "{" + ",".join(entries) + "}" if all(entries) else None


def _entry(item: str, hint: Any) -> str:
    """Return an entry of a mapping; an empty text if it cannot be told from the item."""
    place, _, name = item.replace("=", ":", 1).partition(":")
    spec = user_code.parse(item)
    if hint is str and spec is not None and "." in spec[0] and ":" not in spec[0]:
        return f"{spec[1]}:{item}"
    if hint is float and place.isidentifier() and not name:
        return f"{place}:1.0"
    return f"{place}:{name}" if place.isidentifier() and name and fitting(hint, name) is not None else ""
