"""Functions and classes that a script passes to ``GRPOTrainer``, made available to the configuration by name.

They are written to a file, and the configuration names them as ``FILE.pkl:NAME``. Workers, and processes of
rewards and episodes, read them from there, as they import ``FILE.py:NAME``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrl_grpo.errors import ConfigError
from torchrl_grpo.runtime import user_code

FILE = "objects.pkl"


def label(value: Any) -> str:
    """Return the name of a function or class, or that of the class of another object."""
    return str(getattr(value, "__name__", None) or type(value).__name__).strip("<>")


class PassedObjects:
    """Functions, classes and callable objects by name, and the file in which they travel.

    Args:
        objects: the objects.
        folder: folder of the file.

    Raises:
        ConfigError: an object cannot be sent to another process.
    """

    def __init__(self, objects: Mapping[str, Any], folder: Path) -> None:
        import cloudpickle

        for name, value in objects.items():
            try:
                cloudpickle.dumps(value)
            except Exception as error:
                raise ConfigError(
                    f"{name}: {value!r:.80} cannot be sent to another process: {user_code.describe(error)}; "
                    "open files and connections inside the function, or name a function in a file, "
                    "FILE.py:FUNCTION"
                ) from error
        self._objects = dict(objects)
        self._path = folder.resolve() / FILE
        self._bytes: bytes = cloudpickle.dumps(self._objects)
        # This process has them already.
        user_code.remember(self._path, self._objects)

    def names(self) -> dict[str, str]:
        """Return how the configuration names each object."""
        return {name: f"{self._path}:{name}" for name in self._objects}

    def write(self) -> None:
        """Write the file. A process that reads it meanwhile gets the old one or the new one."""
        if self._objects:
            aside = self._path.with_name(f".{FILE}.{os.getpid()}")
            aside.write_bytes(self._bytes)
            os.replace(aside, self._path)
            # Another trainer with this folder may have been made since.
            user_code.remember(self._path, self._objects)
