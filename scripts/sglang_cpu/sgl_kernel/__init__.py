"""Stands in for SGLang's kernels on a machine without a GPU.

SGLang imports names of this package wherever it runs, and calls none of them with PyTorch's own attention.
Here every name can be imported, and a call raises.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any, NoReturn


class _Absent(types.ModuleType):
    """A module, a class or a function that is not there."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **named: Any) -> NoReturn:
        raise NotImplementedError(f"{self.__name__} needs SGLang's kernels, which are not installed here")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: there is no code."""


sys.meta_path.insert(0, _Finder())
sys.modules[__name__].__class__ = _Absent
