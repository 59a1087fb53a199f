"""Import ``reasoning_gym`` without its warnings, and without what draws.

The import takes seconds, so import this module inside functions.
"""

from __future__ import annotations

import importlib
import sys
import types
import warnings
from typing import Any


class _ImportedWhenUsed(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


# Two tasks compute with it. It imports pyplot, which takes nearly as long as all the rest.
_cells = _ImportedWhenUsed("cellpylib")
sys.modules.setdefault("cellpylib", _cells)
with warnings.catch_warnings():
    # One of its dependencies compares literals with ``is``, and Python warns whenever it compiles that file.
    warnings.simplefilter("ignore", SyntaxWarning)
    import reasoning_gym
if sys.modules["cellpylib"] is _cells:
    # Others import the library itself.
    del sys.modules["cellpylib"]

__all__ = ["reasoning_gym"]
