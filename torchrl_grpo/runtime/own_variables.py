"""Environment variables that this process sets for itself, and that its children do not inherit."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_SET: dict[str, str] = {}
# What the user had set, or None.
_BEFORE: dict[str, str | None] = {}


def set_own(name: str, value: str) -> None:
    """Set a variable for libraries in this process."""
    _BEFORE[name] = inherited().get(name)
    os.environ[name] = _SET[name] = value


def inherited() -> dict[str, str]:
    """Return the environment of a process that is started here. Values that the user has set are in it."""
    theirs = {name: _BEFORE[name] for name in _own()}
    return {name: value for name, value in {**os.environ, **theirs}.items() if value is not None}


@contextmanager
def hidden() -> Iterator[None]:
    """Undo :func:`set_own` inside this context, for a library that starts processes."""
    own, theirs = _own(), inherited()
    for name in own:
        del os.environ[name]
        if name in theirs:
            os.environ[name] = theirs[name]
    try:
        yield
    finally:
        os.environ.update(own)


@contextmanager
def temporary(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside this context; processes started there inherit them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _own() -> dict[str, str]:
    return {name: value for name, value in _SET.items() if os.environ.get(name) == value}
