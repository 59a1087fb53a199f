"""Python values to JSON and back without loss.

JSON turns tuples into lists and integer keys into strings, and it has no fractions. Some scorers of
``reasoning_gym`` need the original types, so this module wraps such values in a marked object.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

_TUPLE = "__tuple__"
_PAIRS = "__pairs__"
_FRACTION = "__fraction__"


def encode(value: Any) -> Any:
    """Convert ``value`` to JSON-serializable data.

    Args:
        value: nested lists, tuples, dictionaries, strings, numbers, fractions, booleans and None.

    Returns:
        Data that :func:`decode` turns back into an equal value.

    Raises:
        TypeError: ``value`` contains another type.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, tuple):
        return {_TUPLE: [encode(item) for item in value]}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and not {_TUPLE, _PAIRS, _FRACTION} & value.keys():
            return {key: encode(item) for key, item in value.items()}
        return {_PAIRS: [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, Fraction):
        return {_FRACTION: [value.numerator, value.denominator]}
    for kind in (str, float, int):  # subclasses, such as numpy's strings and floats
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"cannot store a {type(value).__name__} as JSON")


def decode(value: Any) -> Any:
    """Undo :func:`encode`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {_TUPLE}:
            return tuple(decode(item) for item in value[_TUPLE])
        if value.keys() == {_FRACTION}:
            return Fraction(*value[_FRACTION])
        if value.keys() == {_PAIRS}:
            return {decode(key): decode(item) for key, item in value[_PAIRS]}
        return {key: decode(item) for key, item in value.items()}
    return value
