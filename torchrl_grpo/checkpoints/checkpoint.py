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

import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, cast

from torchrl_grpo.checkpoints import manifest
from torchrl_grpo.checkpoints.manifest import CONFIG, MODEL, TRAINER
from torchrl_grpo.checkpoints.run_dir import MANIFEST, SET_ASIDE, launch_command, new_folder
from torchrl_grpo.config import Config
from torchrl_grpo.config.builtin import dataset_kind
from torchrl_grpo.config.derived import HELD_OUT
from torchrl_grpo.config.judges import is_free_argument
from torchrl_grpo.config.keys import show
from torchrl_grpo.config.remote import is_moved
from torchrl_grpo.config.resume import is_changeable_on_resume
from torchrl_grpo.errors import CheckpointError, RunFolderLost
from torchrl_grpo.runtime.disk_full import is_disk_full_error
from torchrl_grpo.runtime.files.direct_file import DirectFile, Written
from torchrl_grpo.runtime.files.run_records import is_step
from torchrl_grpo.runtime.quoting import quote_if_needed

_TMP_PREFIX = ".writing-"
_REMOVING_PREFIX = ".removing-"
# Neither whole pages nor less than one.
_TRIAL_BYTES = 5000

# Writes files into a folder, and returns what it has written to those that it has summed.
Write = Callable[[Path], Mapping[Path, Written]]


def save(
    run_dir: Path,
    step: int,
    *,
    cfg: Config,
    write_model: Write,
    state: dict[str, Any],
    keep: int,
    best_step: int | None = None,
    write_merged: Write | None = None,
    on_state_read: Callable[[], None] = lambda: None,
) -> Path:
    """Write ``checkpoints/<step>`` and remove all but the ``keep`` newest and the best.

    A kill or an error at any moment leaves the older checkpoints intact. After an error no partial checkpoint
    remains.

    Args:
        run_dir: folder of the run.
        step: number of optimizer steps taken.
        cfg: configuration, which is saved in full.
        write_model: function that writes model and tokenizer into the folder it is given. It returns what
            it has written to files that it has summed.
        state: state of the trainer, made of tensors and plain values.
        keep: number of checkpoints to keep.
        best_step: step of a checkpoint that is kept beside them; None if there is none.
        write_merged: function that writes the merged model; None if none is wanted.
        on_state_read: function called once model and state have been read. They may change from then on.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: the disk is full.
        RunFolderLost: the folder was deleted meanwhile.
    """
    root = run_dir / "checkpoints"
    tmp_dir = root / f"{_TMP_PREFIX}{step}"
    writers = {MODEL: write_model, **({"merged": write_merged} if write_merged is not None else {})}
    folders = [tmp_dir / name for name in writers]
    with _lost_if_missing(root):
        _remove(tmp_dir)
        for folder in folders:
            folder.mkdir(parents=True)
    with _cleanup_on_error(run_dir, tmp_dir, folders):
        _fill(tmp_dir, step, cfg, writers, state, on_state_read)
    target = root / str(step)
    with _lost_if_missing(root):
        replaced = _rename_for_removal(target) if os.path.lexists(target) else None
        tmp_dir.rename(target)
        _flush(root)
        if replaced is not None:
            _remove(replaced)
        # Count only up to this step: a later checkpoint, which a user may have copied here, must not displace
        # the one just written.
        for old in [folder for folder in _step_dirs(root) if int(folder.name) <= step][:-keep]:
            if int(old.name) != best_step:
                _remove(_rename_for_removal(old))
    return target


def try_out(
    run_dir: Path,
    writers: Mapping[str, Callable[[Path], None]],
    least_bytes: int,
    *,
    due: int = 1,
    keep: int = 1,
    keep_best: bool = False,
) -> None:
    """Try whether checkpoints can be written, before the run trains. Nothing of them remains.

    Args:
        run_dir: folder of the run.
        writers: functions that write into a folder of this name what :func:`save` will, without weights.
        least_bytes: size that a checkpoint has at least.
        due: number of checkpoints that the run will write.
        keep: number of checkpoints to keep. The oldest is removed after the next is written.
        keep_best: whether the best is kept beside them.

    Raises:
        CheckpointError: the disk has no room for those that the folder will hold at a time.
        Exception: whatever a function raises.
    """
    root = run_dir / "checkpoints"
    is_new, trial = not root.exists(), root / f"{_TMP_PREFIX}trial"
    _remove(trial)
    try:
        trial.mkdir(parents=True)
        with DirectFile(trial / TRAINER) as file:
            file.write(bytes(_TRIAL_BYTES))
        for name, write in writers.items():
            (trial / name).mkdir()
            write(trial / name)
    finally:
        shutil.rmtree(trial, ignore_errors=True)
        if is_new and root.is_dir():
            root.rmdir()
    count = min(due, max(1, keep + keep_best + 1 - len(_step_dirs(root))))
    least, free = count * least_bytes, shutil.disk_usage(run_dir).free
    if free >= least:
        return
    kept = f"checkpoint.keep={keep}{', that of train.keep_best' if keep_best else ''}"
    several = f"{count} checkpoints at a time ({kept}, and one that is being written) take"
    what = several if count > 1 else "a checkpoint of this run takes"
    fewer = "checkpoint.keep=1 or " if count > 2 and free >= 2 * least_bytes else ""
    raise CheckpointError(
        f"{run_dir}: {what} at least {least / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB are free there; "
        f"make room, or write {fewer}hydra.run.dir=<a folder elsewhere>"
    )


@contextmanager
def _lost_if_missing(root: Path) -> Iterator[None]:
    """Say that a folder is lost if it, or what is in it, is missing.

    Raises:
        RunFolderLost: somebody else has removed it.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise RunFolderLost(f"{root} was deleted or moved while the run wrote to it") from error


@contextmanager
def _cleanup_on_error(run_dir: Path, tmp_dir: Path, folders: list[Path]) -> Iterator[None]:
    """Remove the partial checkpoint after an error.

    Raises:
        CheckpointError: the disk is full; the message says how to continue the run.
        RunFolderLost: somebody else has removed it.
    """
    try:
        yield
    except Exception as error:
        # Libraries report a missing folder in words of their own.
        missing = error.filename if isinstance(error, FileNotFoundError) else None
        if str(missing).startswith(str(tmp_dir)) or not all(folder.is_dir() for folder in folders):
            raise RunFolderLost(f"{tmp_dir} was deleted or moved while the run wrote to it") from error
        written = sum(path.stat().st_size for path in tmp_dir.rglob("*") if path.is_file()) / 2**30
        free = shutil.disk_usage(run_dir).free / 2**30
        shutil.rmtree(tmp_dir, ignore_errors=True)
        if not is_disk_full_error(error):
            raise
        raise CheckpointError(
            f"{tmp_dir.with_name(tmp_dir.name.removeprefix(_TMP_PREFIX))}: the checkpoint could not be "
            f"written ({error}; {written:.2f} GiB were written and {free:.2f} GiB are free); "
            f"free disk space: {how_to_continue(run_dir)}"
        ) from error


def _fill(
    tmp_dir: Path,
    step: int,
    cfg: Config,
    writers: dict[str, Write],
    state: dict[str, Any],
    on_state_read: Callable[[], None],
) -> None:
    """Write a checkpoint into the folder ``tmp_dir`` and flush it to the disk, with the manifest last."""
    import torch
    from omegaconf import OmegaConf
    from torch.utils.serialization import config as serialization

    written: dict[Path, Written] = {}
    for name, write in writers.items():
        written.update(write(tmp_dir / name))
    # The manifest has a checksum of the file, and those of its parts would take as long as writing it.
    unsummed = serialization.patch({"save.compute_crc32": False})  # type: ignore[attr-defined]  # torch adds it
    with unsummed, DirectFile(tmp_dir / TRAINER) as file:
        torch.save(state, cast(IO[bytes], file))
    written[tmp_dir / TRAINER] = file.written
    on_state_read()
    OmegaConf.save(OmegaConf.create(asdict(cfg)), tmp_dir / CONFIG)
    files = sorted(path for path in tmp_dir.rglob("*") if path.is_file())
    for path in files:
        _flush(path)
    manifest.write(tmp_dir, step, files, written)
    for path in (tmp_dir / MANIFEST, *(tmp_dir / name for name in writers), tmp_dir):
        _flush(path)


def clean(run_dir: Path) -> None:
    """Clean up the temporary folders that a killed process left behind.

    A complete checkpoint gets its final name, unless a folder of that name exists. Every other temporary
    folder is removed, and so is a file or a link in its place.
    """
    for leftover in list((run_dir / "checkpoints").glob(".*-*")):
        name = leftover.name.removeprefix(_TMP_PREFIX)
        target = leftover.with_name(name)
        complete = is_step(name) and not leftover.is_symlink() and manifest.find_damage(leftover) is None
        if complete and not os.path.lexists(target):
            leftover.rename(target)
        elif leftover.name.startswith((_TMP_PREFIX, _REMOVING_PREFIX)):
            _remove(leftover)


def rename_checkpoints_after(run_dir: Path, step: int) -> None:
    """Rename the checkpoints later than ``step``.

    A run that is resumed at ``step`` repeats the later steps. A later ``resume=auto`` must not continue from
    the old checkpoints, because the metrics of their steps were removed.
    """
    for folder in _step_dirs(run_dir / "checkpoints"):
        if int(folder.name) > step:
            target = new_folder(folder.with_name(f"{folder.name}{SET_ASIDE}"))
            folder.rename(target)
            warnings.warn(
                f"{folder} is later than the step resumed and is kept as {target.name}", stacklevel=2
            )


def find(run_dir: Path, resume: str, verify_checksums: bool = True) -> Path:
    """Find the checkpoint that ``resume`` selects: the one it names, or else the newest undamaged one.

    This function does not import torch, so a run that cannot be resumed fails at once.

    Args:
        run_dir: folder of the run.
        resume: ``auto``, or a path to the run, to its checkpoints folder, or to one checkpoint.
        verify_checksums: whether to check every byte and not only the sizes of the files.

    Raises:
        CheckpointError: the named checkpoint is damaged, or the run has no undamaged checkpoint.
    """
    named = Path(resume)
    if resume != "auto" and named.parent.name == "checkpoints":
        reason = manifest.find_damage(named, verify_checksums)
        if reason is not None:
            raise CheckpointError(
                f"resume={resume}: {reason}; name another checkpoint, or write resume={run_dir}"
            )
        return named
    for folder in reversed(_step_dirs(run_dir / "checkpoints")):
        reason = manifest.find_damage(folder, verify_checksums)
        if reason is None:
            return folder
        warnings.warn(f"{folder} is skipped: {reason}", stacklevel=2)
    raise CheckpointError(
        f"resume={resume}: {run_dir} holds no undamaged checkpoint; write resume=null to start a new run"
    )


def how_to_continue(run_dir: Path) -> str:
    """Return one line that says how to continue an interrupted run."""
    folder = run_dir.resolve()
    if not _step_dirs(folder / "checkpoints"):
        return f"{folder} has no checkpoint yet to continue from"
    if command := launch_command(folder, f"resume={quote_if_needed(str(folder))}", resumed=True):
        return f"this command continues from its last checkpoint: {command}"
    return (
        f"resume={folder} continues from its last checkpoint; repeat the arguments of the original command, "
        "or call train(resume=True) in Python"
    )


def check_same_run(folder: Path, cfg: Config) -> None:
    """Refuse a configuration that would change the results of the resumed run.

    Args:
        folder: folder of the checkpoint.
        cfg: configuration of the resumed run.

    Raises:
        CheckpointError: a key that changes the results differs from the saved configuration.
    """
    from omegaconf import OmegaConf

    saved = OmegaConf.to_container(OmegaConf.load(folder / CONFIG))
    has_own_rows = dataset_kind(cfg.env.dataset) == "jsonl"
    for key, before, now in _differences(_with_defaults(saved, asdict(Config())), asdict(cfg)):
        if key == "eval.num_problems" and not has_own_rows and {before, now} == {None, HELD_OUT}:
            # null stands for this number, which was the default of earlier runs.
            continue
        if key in ("env.environment", "env.tools") and is_moved(before, now):
            continue
        if not is_changeable_on_resume(key, before) and not is_free_argument(cfg, key):
            run_dir = folder.parent.parent
            command = f" (its command was {known})" if (known := launch_command(run_dir)) else ""
            raise CheckpointError(
                f"{key}={show(now)}: the run in {run_dir} was started with {key}={show(before)}{command}; "
                f"resume with that, or start a new run from its weights {_from_weights(folder)}"
            )


def _from_weights(folder: Path) -> str:
    """Return how to start a new run from the weights of a checkpoint, after "from its weights"."""
    merged, model = folder / "merged", folder / MODEL
    if merged.is_dir() or not (model / "adapter_config.json").is_file():
        return f"with model.name={merged if merged.is_dir() else model} and without resume"
    return (
        f"without resume: merge the adapters in {model} with their base model (docs/lora.md#checkpoints has "
        "the lines), and write model.name=<the folder of the merged model>"
    )


def load_state(folder: Path) -> dict[str, Any]:
    """Load the trainer's state from a checkpoint.

    Returns:
        Plain values, and tensors that are mapped from the file and read on access. Several ranks of a machine
        share the pages of the file, so no rank holds the optimizer moments of others. Copy each tensor that
        must outlive the file with :func:`clone_tensors`.
    """
    import torch

    state: dict[str, Any] = torch.load(folder / TRAINER, map_location="cpu", weights_only=True, mmap=True)
    return state


def clone_tensors(state: Any) -> Any:
    """Copy the result of :func:`load_state`, or a part of it, from the file into memory."""
    import torch

    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: clone_tensors(value) for key, value in state.items()}
    return type(state)(map(clone_tensors, state)) if isinstance(state, list | tuple) else state


def _step_dirs(root: Path) -> list[Path]:
    folders = [path for path in root.glob("*") if is_step(path.name) and path.is_dir()]
    return sorted(folders, key=lambda path: int(path.name))


def _rename_for_removal(folder: Path) -> Path:
    """Rename a folder before its removal, so that a kill leaves nothing that looks complete."""
    target = folder.with_name(f"{_REMOVING_PREFIX}{folder.name}")
    _remove(target)
    return folder.rename(target)


def _remove(path: Path) -> None:
    """Delete a folder, or a file or link in its place, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _with_defaults(saved: Any, defaults: dict[str, Any]) -> dict[str, Any]:
    """Add the defaults of keys that did not exist when the configuration was saved."""
    merged = dict(saved)
    for key, default in defaults.items():
        if key not in merged:
            merged[key] = default
        elif isinstance(default, dict) and isinstance(merged[key], dict):
            merged[key] = _with_defaults(merged[key], default)
    return merged


def _differences(before: Any, now: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(now, dict):
        changes = []
        for key in sorted({*before, *now}):
            changes += _differences(before.get(key), now.get(key), f"{prefix}.{key}" if prefix else str(key))
        return changes
    return [] if before == now else [(prefix, before, now)]


def _flush(path: Path) -> None:
    """Flush a file, or the list of names in a folder, to the disk before a later rename."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
