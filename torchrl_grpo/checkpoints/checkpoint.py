"""Writes and reads checkpoints.

A checkpoint is written under a temporary name and then renamed. It is loaded only if every byte is intact.
``checkpoints/<step>/`` contains:

* ``model/``: weights (safetensors), configuration and tokenizer, as ``from_pretrained`` reads them. With LoRA
  it contains adapters and tokenizer, as PEFT reads them.
* ``merged/``: the model with its adapters merged, on request.
* ``trainer.pt``: optimizer, schedule, scaler, random states, buffer, data position and counters. It contains
  only tensors and plain values and is read with ``weights_only=True``, so it cannot execute code.
* ``config.yaml``: the full configuration.
* ``manifest.json``: size and checksum of each file, written last.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchrl_grpo.checkpoints.run_dir import MANIFEST, words_of
from torchrl_grpo.config import Config
from torchrl_grpo.config.resume import may_change
from torchrl_grpo.errors import CheckpointError
from torchrl_grpo.runtime.disk_full import says_no_room

_ASIDE = ".writing-"
_DOOMED = ".removing-"
_TRAINER = "trainer.pt"
_CONFIG = "config.yaml"


def save(
    run_dir: Path,
    step: int,
    *,
    cfg: Config,
    write_model: Callable[[Path], None],
    state: dict[str, Any],
    keep: int,
    write_merged: Callable[[Path], None] | None = None,
) -> Path:
    """Write ``checkpoints/<step>`` and remove all but the ``keep`` newest.

    A kill or an error at any moment leaves the older checkpoints intact. After an error no partial checkpoint
    remains.

    Args:
        run_dir: folder of the run.
        step: number of optimizer steps taken.
        cfg: configuration, which is saved in full.
        write_model: function that writes model and tokenizer into the folder it is given.
        state: state of the trainer, made of tensors and plain values.
        keep: number of checkpoints to keep.
        write_merged: function that writes the merged model; None if none is wanted.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: the disk is full.
    """
    root = run_dir / "checkpoints"
    aside = root / f"{_ASIDE}{step}"
    shutil.rmtree(aside, ignore_errors=True)
    writers = {"model": write_model, **({"merged": write_merged} if write_merged is not None else {})}
    with _or_nothing(run_dir, aside):
        _fill(aside, step, cfg, writers, state)
    target = root / str(step)
    replaced = _doomed(target) if target.exists() else None
    aside.rename(target)
    _flush(root)
    if replaced is not None:
        shutil.rmtree(replaced)
    # Count only up to this step, so that a later checkpoint cannot displace the one just written.
    for old in [folder for folder in _complete(root) if int(folder.name) <= step][:-keep]:
        shutil.rmtree(_doomed(old))
    return target


@contextmanager
def _or_nothing(run_dir: Path, aside: Path) -> Iterator[None]:
    """Remove the partial checkpoint after an error.

    Raises:
        CheckpointError: the disk is full; the message says how to continue the run.
    """
    try:
        yield
    except Exception as error:
        written = sum(path.stat().st_size for path in aside.rglob("*") if path.is_file()) / 2**30
        room = shutil.disk_usage(run_dir).free / 2**30
        shutil.rmtree(aside, ignore_errors=True)
        if not says_no_room(error):
            raise
        raise CheckpointError(
            f"{aside.with_name(aside.name.removeprefix(_ASIDE))}: the checkpoint could not be written "
            f"({error}; the disk took {written:.2f} GiB of it and has room for {room:.2f}); make room: "
            f"{how_to_continue(run_dir)}"
        ) from error


def _fill(
    aside: Path, step: int, cfg: Config, writers: dict[str, Callable[[Path], None]], state: dict[str, Any]
) -> None:
    """Write a checkpoint into the folder ``aside`` and flush it to the disk, with the manifest last."""
    import torch
    from omegaconf import OmegaConf

    for name, write in writers.items():
        (aside / name).mkdir(parents=True)
        write(aside / name)
    torch.save(state, aside / _TRAINER)
    OmegaConf.save(OmegaConf.create(asdict(cfg)), aside / _CONFIG)
    files = sorted(path for path in aside.rglob("*") if path.is_file())
    entries = {
        str(path.relative_to(aside)): {"bytes": path.stat().st_size, "crc32": _crc32(path)} for path in files
    }
    for path in files:
        _flush(path)
    (aside / MANIFEST).write_text(json.dumps({"step": step, "files": entries}, indent=1))
    for path in (aside / MANIFEST, *(aside / name for name in writers), aside):
        _flush(path)


def clean(run_dir: Path) -> None:
    """Remove partial checkpoints that a killed process left behind, and rename those that are complete."""
    for leftover in list((run_dir / "checkpoints").glob(".*-*")):
        target = leftover.with_name(leftover.name.removeprefix(_ASIDE))
        if target != leftover and not target.exists() and damage(leftover) is None:
            leftover.rename(target)
        elif leftover.name.startswith((_ASIDE, _DOOMED)):
            shutil.rmtree(leftover)


def set_aside_after(run_dir: Path, step: int) -> None:
    """Rename the checkpoints later than ``step``, because a run resumed at ``step`` writes them again.

    Otherwise a later ``resume=auto`` would continue from them and skip steps whose metrics were removed.
    """
    for folder in _complete(run_dir / "checkpoints"):
        if int(folder.name) > step:
            target = folder.with_name(f"{folder.name}.set-aside")
            if target.exists():
                shutil.rmtree(target)
            folder.rename(target)
            warnings.warn(
                f"{folder} is later than the step resumed and is kept as {target.name}", stacklevel=2
            )


def find(run_dir: Path, resume: str, contents: bool = True) -> Path:
    """Find the checkpoint that ``resume`` selects: the one it names, or else the newest undamaged one.

    This function does not import torch, so a run that cannot be resumed fails at once.

    Args:
        run_dir: folder of the run.
        resume: ``auto``, or a path to the run, to its checkpoints folder, or to one checkpoint.
        contents: whether to check every byte, see :func:`damage`.

    Raises:
        CheckpointError: the named checkpoint is damaged, or the run has no undamaged checkpoint.
    """
    named = Path(resume)
    if resume != "auto" and named.parent.name == "checkpoints":
        reason = damage(named, contents)
        if reason is not None:
            raise CheckpointError(
                f"resume={resume}: {reason}; name another checkpoint, or write resume={run_dir}"
            )
        return named
    for folder in reversed(_complete(run_dir / "checkpoints")):
        reason = damage(folder, contents)
        if reason is None:
            return folder
        warnings.warn(f"{folder} is skipped: {reason}", stacklevel=2)
    raise CheckpointError(
        f"resume={resume}: {run_dir} holds no undamaged checkpoint; write resume=null to start a new run"
    )


def how_to_continue(run_dir: Path) -> str:
    """Return one line that says how to continue an interrupted run."""
    if _complete(run_dir / "checkpoints"):
        words = "with the words that the run was started with"
        which = f": {known}" if (known := words_of(run_dir)) else ""
        return f"resume={run_dir.resolve()} continues from its last checkpoint, {words}{which}"
    return f"{run_dir.resolve()} has no checkpoint yet to continue from"


def damage(folder: Path, contents: bool = True) -> str | None:
    """Describe the damage of a checkpoint; return None if it is undamaged.

    Args:
        folder: folder of the checkpoint.
        contents: whether to check every byte. If false, only the sizes of the files are checked.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        entries = [(name, entry["bytes"], entry["crc32"]) for name, entry in manifest["files"].items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {MANIFEST} cannot be read ({error!r})"
    for name, size, crc32 in entries:
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if contents and _crc32(path) != crc32:
            return f"{name} has another checksum than when it was written"
    return None


def check_same_run(folder: Path, cfg: Config) -> None:
    """Refuse a configuration that would change the results of the resumed run.

    Args:
        folder: folder of the checkpoint.
        cfg: configuration of the resumed run.

    Raises:
        CheckpointError: a key that changes the results differs from the saved configuration.
    """
    from omegaconf import OmegaConf

    saved = OmegaConf.to_container(OmegaConf.load(folder / _CONFIG))
    for key, before, now in _differences(_completed(saved, asdict(Config())), asdict(cfg)):
        if not may_change(key, before):
            weights = folder / ("merged" if (folder / "merged").is_dir() else "model")
            run_dir = folder.parent.parent
            which = f" (its words were {known})" if (known := words_of(run_dir)) else ""
            raise CheckpointError(
                f"{key}={now}: the run in {run_dir} was started with {key}={before}{which}; "
                "resume with that, or start a new run from its weights with "
                f"model.name={weights} and without resume"
            )


def load_state(folder: Path) -> dict[str, Any]:
    """Load the trainer's state from a checkpoint.

    Returns:
        Plain values, and tensors that are mapped from the file and read on access. Several ranks of a machine
        share the pages of the file, so no rank holds the optimizer moments of others. Copy each tensor that
        must outlive the file with :func:`in_memory`.
    """
    import torch

    state: dict[str, Any] = torch.load(folder / _TRAINER, map_location="cpu", weights_only=True, mmap=True)
    return state


def in_memory(state: Any) -> Any:
    """Copy the result of :func:`load_state`, or a part of it, from the file into memory."""
    import torch

    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: in_memory(value) for key, value in state.items()}
    return type(state)(map(in_memory, state)) if isinstance(state, list | tuple) else state


def _complete(root: Path) -> list[Path]:
    found = [path for path in root.glob("*") if path.name.isdigit() and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name))


def _doomed(folder: Path) -> Path:
    """Rename a folder before its removal, so that a kill leaves nothing that looks complete."""
    doomed = folder.with_name(f"{_DOOMED}{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    return folder.rename(doomed)


def _completed(saved: Any, defaults: dict[str, Any]) -> dict[str, Any]:
    """Add the defaults of keys that did not exist when the configuration was saved."""
    found = dict(saved)
    for key, default in defaults.items():
        if key not in found:
            found[key] = default
        elif isinstance(default, dict) and isinstance(found[key], dict):
            found[key] = _completed(found[key], default)
    return found


def _differences(before: Any, now: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(now, dict):
        found = []
        for key in sorted({*before, *now}):
            found += _differences(before.get(key), now.get(key), f"{prefix}.{key}" if prefix else str(key))
        return found
    return [] if before == now else [(prefix, before, now)]


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def _flush(path: Path) -> None:
    """Flush a file, or the list of names in a folder, to the disk before a later rename."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
