"""Keeps what stays until the end of the tests out of garbage collections.

A full collection walks through all that lives: each module of torch, transformers and vLLM, and thousands of
collected tests. It takes half a second, and each run and each engine causes some. Objects that are frozen are
left out.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

_FREEZE, _UNFREEZE = gc.freeze, gc.unfreeze
# vLLM freezes what lives when an engine has started, and unfreezes everything when it ends.
_OTHERS = mock.patch.multiple(gc, freeze=lambda: None, unfreeze=lambda: None)
_modules: int | None = None


def start() -> None:
    """Let nobody else freeze or unfreeze objects."""
    _OTHERS.start()
    # At exit, the bindings of Triton print a page about each object that is never collected.
    atexit.register(_UNFREEZE)


def freeze_new_modules() -> None:
    """Freeze what has been imported since the last call, if that is much: an engine imports 2,000 modules.

    What lives is frozen with it, and no collection ends it. So nothing may live that must end earlier.
    """
    global _modules
    if len(sys.modules) > (_modules or 0) + 300:
        # The first time, there is little garbage among what was imported, and looking for it takes a second.
        if _modules is not None:
            gc.collect()
        _FREEZE()
        _modules = len(sys.modules)


@contextmanager
def not_frozen() -> Iterator[None]:
    """Let an engine freeze and unfreeze as in a run, and nothing be frozen at its start."""
    global _modules
    _OTHERS.stop()
    _UNFREEZE()
    try:
        yield
    finally:
        _modules = 0
        _OTHERS.start()
