"""Imports ``reasoning_gym`` without its noise. That takes seconds: import this module inside functions."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    # One of its dependencies compares with ``is`` where Python warns, each time it is compiled.
    warnings.simplefilter("ignore", SyntaxWarning)
    import reasoning_gym

__all__ = ["reasoning_gym"]
