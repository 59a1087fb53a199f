"""Environment variables that this process sets for itself, and that its children do not inherit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_SET: dict[str, str] = {}


def set_own(name: str, value: str) -> None:
    """Set a variable for libraries in this process."""
    os.environ[name] = _SET[name] = value


def inherited() -> dict[str, str]:
    """Return the environment of a process that is started here. Values that the user has set are in it."""
    return {name: value for name, value in os.environ.items() if _SET.get(name) != value}


@contextmanager
def hidden() -> Iterator[None]:
    """Remove these variables inside this context, for a library that starts processes."""
    own = os.environ.keys() - inherited().keys()
    for name in own:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update({name: _SET[name] for name in own})
