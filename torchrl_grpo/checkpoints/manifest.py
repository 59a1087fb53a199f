"""The manifest of a checkpoint: size and checksum of each file, by which damage is found."""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import xxhash

from torchrl_grpo.checkpoints.run_dir import MANIFEST
from torchrl_grpo.runtime.files.direct_file import Written
from torchrl_grpo.runtime.files.shared_files import open_regular, read_regular

# Parts that each checkpoint has.
MODEL, TRAINER, CONFIG = "model", "trainer.pt", "config.yaml"
# Key of a file's checksum. Manifests of earlier development versions have the other one.
_CHECKSUM, _FORMER_CHECKSUM = "xxh3_64", "crc32"


def write(folder: Path, step: int, files: Sequence[Path], written: Mapping[Path, Written]) -> None:
    """Write the manifest of a checkpoint.

    Args:
        folder: folder of the checkpoint.
        step: its step.
        files: its files.
        written: what was written to those that were summed meanwhile. The others are read.

    Raises:
        OSError: a file is missing, or has another size than what was written to it.
    """
    for path, (size, _) in written.items():
        if path.stat().st_size != size:
            raise OSError(errno.EIO, f"{size} bytes were written to it, and it has another size", str(path))
    entries = {
        str(path.relative_to(folder)): {
            "bytes": path.stat().st_size,
            _CHECKSUM: written[path].checksum if path in written else _checksum(path),
        }
        for path in files
        if not _is_card(path)
    }
    (folder / MANIFEST).write_text(json.dumps({"step": step, "files": entries}, indent=1))


def find_damage(folder: Path, verify_checksums: bool = True) -> str | None:
    """Describe the damage of a checkpoint; return None if it is undamaged.

    Args:
        folder: folder of the checkpoint.
        verify_checksums: whether to check every byte. If false, only the sizes of the files are checked.
    """
    try:
        content = json.loads(read_regular(folder / MANIFEST))
        entries = [
            (name, entry["bytes"], kind, entry[kind])
            for name, entry in content["files"].items()
            for kind in [_CHECKSUM if _CHECKSUM in entry else _FORMER_CHECKSUM]
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"its {MANIFEST} cannot be read ({error!r})"
    model = folder / MODEL
    if not model.is_dir():
        return f"{MODEL} is missing"
    listed = {name.partition("/")[0] for name, *_ in entries}
    for part in (CONFIG, TRAINER, *([MODEL] if any(model.iterdir()) else [])):
        if part not in listed:
            return f"its {MANIFEST} does not list {part}"
    for name, size, kind, checksum in entries:
        path = folder / name
        if _is_card(path):
            continue
        try:
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes instead of {size}"
            if verify_checksums and _checksum(path, kind) != checksum:
                return f"{name} has another checksum than when it was written"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def _is_card(path: Path) -> bool:
    # Users edit the card of a model before they publish it.
    return path.name == "README.md"


def _checksum(path: Path, kind: str = _CHECKSUM) -> str | int:
    hasher, former = xxhash.xxh3_64(), 0
    with os.fdopen(open_regular(path), "rb") as file:
        while block := file.read(1 << 22):
            if kind == _CHECKSUM:
                hasher.update(block)
            else:
                former = zlib.crc32(block, former)
    return hasher.hexdigest() if kind == _CHECKSUM else former
