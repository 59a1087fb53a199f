"""Makes sure that compiled code comes from this user alone.

``torch.compile`` keeps code among the temporary files, in a folder whose name everybody can guess, and runs
what it finds there. Whoever makes that folder first decides what runs.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from torchrl_grpo.errors import ConfigError
from torchrl_grpo.runtime.files.shared_files import own_folder

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def use_own() -> None:
    """Name the folder to torch and to child processes, and create it if there is none.

    Raises:
        ConfigError: the folder is somebody else's.
    """
    if _VARIABLE in os.environ:
        return
    folder = Path(tempfile.gettempdir()) / f"torchinductor_{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    try:
        with own_folder(folder):
            os.environ[_VARIABLE] = str(folder)
    except OSError as error:
        raise ConfigError(
            f"{folder}: is not a folder of this user ({error.strerror}), and torch.compile would run what "
            f"lies there; set {_VARIABLE} to a folder of your own"
        ) from error
