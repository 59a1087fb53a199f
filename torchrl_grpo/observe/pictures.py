"""Stores the pictures of prompts, each once, and reads them for pages and tables.

Lines of ``rollouts.jsonl`` have the names of their files.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torchrl_grpo.data.pictures import decode
from torchrl_grpo.runtime.disk_full import is_disk_full_error
from torchrl_grpo.runtime.files.shared_files import read_small

if TYPE_CHECKING:
    from PIL.Image import Image

PICTURES = "pictures"
# Longest side of a picture in a page or a table.
_SIDE = 320


def write_pictures(run_dir: Path, shown: Iterable[Mapping[str, bytes]]) -> None:
    """Write pictures that are not there yet. A full disk loses them with a warning, as it does responses.

    Args:
        run_dir: folder of the run.
        shown: for each prompt, encoded pictures by the names of their files.
    """
    for files in shown:
        for name, data in files.items():
            path = run_dir / PICTURES / name
            if path.exists():
                continue
            path.parent.mkdir(exist_ok=True)
            # A run that is killed here leaves no half of a picture under its name.
            unfinished = path.with_name(f".{name}")
            try:
                unfinished.write_bytes(data)
                os.replace(unfinished, path)
            except OSError as error:
                if not is_disk_full_error(error):
                    raise
                unfinished.unlink(missing_ok=True)
                warnings.warn(
                    f"{path.parent} could not grow ({error.strerror}); the run goes on without these "
                    "pictures, so make room there",
                    stacklevel=2,
                )
                return


def read_reduced(run_dir: Path, name: str) -> Image | None:
    """Return a stored picture with at most 320 pixels on a side; None if it is gone or damaged."""
    try:
        picture = decode(read_small(run_dir / PICTURES / name))
    except (OSError, ValueError):
        return None
    picture.thumbnail((_SIDE, _SIDE))
    return picture
