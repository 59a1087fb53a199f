"""Python objects by name: functions and classes that are passed to a trainer, as the configuration has them.

They are written to a file, and the configuration names them as ``FILE.pkl:NAME``. Workers, and processes of
rewards and episodes, read them from there, as they import ``FILE.py:NAME``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrl_grpo.errors import ConfigError
from torchrl_grpo.runtime import user_code

FILE = "objects.pkl"


def label(found: Any) -> str:
    """Return the name of a function or class, or that of the class of another object."""
    return str(getattr(found, "__name__", None) or type(found).__name__).strip("<>")


def write(objects: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Write objects to a file and return how the configuration names each.

    Args:
        objects: functions, classes and callable objects by name.
        folder: folder of the file.

    Raises:
        ConfigError: an object cannot be sent to another process.
    """
    import cloudpickle

    path = folder.resolve() / FILE
    for name, found in objects.items():
        try:
            cloudpickle.dumps(found)
        except Exception as error:
            raise ConfigError(
                f"{name}: {found!r:.80} cannot be sent to another process: {user_code.describe(error)}; open "
                "files and connections inside the function, or name a function in a file, FILE.py:FUNCTION"
            ) from error
    if objects:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(cloudpickle.dumps(dict(objects)))
        # This process has them already.
        user_code.remember(path, objects)
    return {name: f"{path}:{name}" for name in objects}
