"""Chooses the folder that a run writes to, before Hydra creates one.

A new run gets its own folder, even if two runs start in the same second. A resumed run continues in its
original folder. No run writes to a folder that holds another run. For this module a checkpoint is a folder
with a manifest; :mod:`torchrl_grpo.checkpoints.checkpoint` defines its contents.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchrl_grpo.config.keys import bad_value
from torchrl_grpo.config.public import shown_overrides
from torchrl_grpo.errors import CheckpointError, ConfigError, UserError
from torchrl_grpo.runtime.config_dir import config_dir
from torchrl_grpo.runtime.files.run_records import DAMAGED, RESUMED, is_step, newest_record, read_yaml
from torchrl_grpo.runtime.files.shared_files import open_regular
from torchrl_grpo.runtime.invocation import program

MANIFEST = "manifest.json"
LOCK = ".lock"
# Value of ``resume`` that continues the run of ``hydra.run.dir``, or starts it.
AUTO_OR_NEW = "auto_or_new"
# End of the name of a folder whose run began again in another one.
SET_ASIDE = ".set-aside"
# Hydra settings that a resumed run must not repeat: its folders, and those that this project's command line
# sets by itself.
_NOT_REPEATED = ("hydra.run.dir", "hydra.sweep.dir", "hydra.job.name", "hydra.output_subdir", "hydra.mode")


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Return the complete checkpoints of a run folder, oldest first."""
    manifests = run_dir.glob(f"checkpoints/*/{MANIFEST}")
    folders = [manifest.parent for manifest in manifests if is_step(manifest.parent.name)]
    return sorted(folders, key=lambda folder: int(folder.name))


def explain(error: BaseException, run_dir: Path) -> ConfigError | None:
    """Describe what the system said of a file of a run folder; None if the error is about something else."""
    # A library may have raised an error of its own because of it.
    cause = error if isinstance(error, OSError) else error.__cause__
    if isinstance(error, UserError) or not isinstance(cause, OSError):
        return None
    folder = Path(os.path.abspath(run_dir))
    for name in (cause.filename, cause.filename2):
        path = Path(os.path.abspath(name)) if isinstance(name, str | Path) else None
        if path is not None and (path == folder or path in folder.parents or folder in path.parents):
            return ConfigError(
                f"the run folder {run_dir} cannot be used: {path}: {cause.strerror}; repair that, or write "
                "hydra.run.dir=<another folder> for a new run instead"
            )
    return None


@contextmanager
def explained_errors(run_dir: Path) -> Iterator[None]:
    """Turn errors of the system about the files of a run folder into ones that name it and a fix.

    Raises:
        ConfigError: such an error.
    """
    try:
        yield
    except Exception as error:
        if (explained := explain(error, run_dir)) is not None:
            raise explained from error
        raise


def holds_run(folder: Path) -> bool:
    """Return whether a run or a sweep has written results below ``folder``."""
    names = ("metrics.jsonl", "checkpoints")
    return any((folder / name).exists() or any(folder.glob(f"*/{name}")) for name in names)


def new_folder(folder: Path) -> Path:
    """Create a folder that did not exist before.

    Args:
        folder: path of the folder to create.

    Returns:
        The folder. Its name ends in ``-1``, ``-2``, ... if ``folder`` exists already.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count():
        candidate = folder.with_name(f"{folder.name}-{number}") if number else folder
        try:
            candidate.mkdir()  # atomic: of two concurrent runs only one succeeds
        except FileExistsError:
            continue
        return candidate
    raise AssertionError("itertools.count() ended")


def check_free(key: str, folder: Path) -> None:
    """Refuse a folder that the user chose and that holds another run.

    Args:
        key: configuration key that names the folder.
        folder: folder to check.

    Raises:
        ConfigError: the folder is a file, or it holds results of an earlier run.
    """
    if folder.exists() and not folder.is_dir():
        raise bad_value(key, folder, "it is a file and not a folder", f"{key}=<another folder>")
    if holds_run(folder):
        continuing = "sweep.resume" if key == "hydra.sweep.dir" else "resume"
        raise ConfigError(
            f"{key}={folder}: it holds an earlier run, which is left as it is; "
            f"write {continuing}={folder} to continue it, or {key}=<another folder> instead"
        )


def check_kinds(folder: Path) -> None:
    """Refuse a run folder with something that is neither a file nor a folder, as opening it could block.

    Args:
        folder: folder that the run will write to; it need not exist.

    Raises:
        ConfigError: there is a FIFO, a socket or a device.
    """
    for path in [*folder.glob("*"), *folder.glob(".hydra/*")]:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ConfigError(
                f"the run folder {folder} cannot be used: {path} is neither a file nor a folder; remove it, "
                "or write hydra.run.dir=<another folder> for a new run instead"
            )


def check_unclaimed(folder: Path) -> None:
    """Refuse a folder that a process is writing to, before Hydra writes its record of this start there.

    Raises:
        ConfigError: a process is, or the lock file is no ordinary file.
    """
    if (folder / LOCK).exists():
        with explained_errors(folder), claimed(folder):
            pass


def set_aside(folder: Path) -> None:
    """Rename a folder that holds results of a run, so that the run can begin again.

    The caller has checked that it has no checkpoint.

    Args:
        folder: folder of the run. It becomes ``<name>.set-aside``, with a number behind it if that exists.

    Raises:
        ConfigError: another process is writing to it, or it is a file.
    """
    if not folder.is_dir() or not holds_run(folder):
        check_free("hydra.run.dir", folder)
        check_kinds(folder)
        check_unclaimed(folder)
        return
    with claimed(folder):
        target = new_folder(folder.with_name(f"{folder.name}{SET_ASIDE}"))
        folder.rename(target)


def folder_to_resume(resume: str, chosen: Path | None, outputs: Path = Path("outputs")) -> Path | None:
    """Find the run folder that ``resume`` selects.

    Args:
        resume: ``auto``, ``auto_or_new``, or a path to a run folder, to its ``checkpoints`` folder, or to
            one checkpoint.
        chosen: folder that ``hydra.run.dir`` names on the command line; None if it names none.
        outputs: folder that ``auto`` searches if ``chosen`` is None.

    Returns:
        The run folder, which holds at least one complete checkpoint; None if ``auto_or_new`` finds none.

    Raises:
        CheckpointError: there is no checkpoint to resume from.
        ConfigError: ``resume`` and ``hydra.run.dir`` name different folders, or ``auto_or_new`` stands
            without ``hydra.run.dir``.
    """
    if resume == AUTO_OR_NEW:
        if chosen is None:
            wrong = "a run that begins again needs the folder that it had"
            raise bad_value("resume", resume, wrong, "hydra.run.dir=FOLDER beside it, or resume=auto")
        return chosen if complete_checkpoints(chosen) else None
    if resume == "auto":
        return _newest(outputs) if chosen is None else _checked(resume, chosen)
    folder = _checked(resume, _run_of(Path(resume)))
    if chosen is not None and chosen.resolve() != folder.resolve():
        wrong = f"a resumed run goes on in its own folder, and resume={resume} is of {folder}"
        raise bad_value("hydra.run.dir", chosen, wrong, "resume alone")
    return folder


def public_command(record: Path) -> str:
    """Return the command of a start of a run without what may be secret; empty without a record.

    Args:
        record: folder of Hydra's record of the start.
    """
    try:
        job = read_yaml(record / "hydra.yaml")["hydra"]["job"]
        words = shown_overrides(read_yaml(record / "overrides.yaml"))
        return shlex.join([Path(job["name"]).name, f"--config-name={Path(job['config_name']).name}", *words])
    except (OSError, *DAMAGED, KeyError, TypeError, AttributeError):
        return ""


def launch_command(run_dir: Path, *more: str, resumed: bool = False) -> str:
    """Return the command that started a run, from Hydra's record; empty without a record.

    Args:
        run_dir: folder of the run.
        more: arguments to add.
        resumed: whether to take the command of the last resumption, if there was one. Its overrides may
            differ from those of the first start.
    """
    record = newest_record(run_dir) if resumed else run_dir / ".hydra"
    try:
        hydra = read_yaml(record / "hydra.yaml")["hydra"]
        command = [*program(hydra["job"]["name"]), f"--config-name={hydra['job']['config_name']}"]
        for source in hydra["runtime"]["config_sources"]:
            if source["provider"] == "command-line":
                command.append(f"--config-dir={source['path']}")
            elif source["provider"] == "main" and Path(source["path"]) != config_dir():
                command.append(f"--config-path={source['path']}")
        command += [
            word for word in hydra["overrides"]["hydra"] if word.partition("=")[0] not in _NOT_REPEATED
        ]
        words = read_yaml(record / "overrides.yaml")
        command += [word for word in words if not word.startswith("resume=")]
        return shlex.join([*command, *more])
    except (OSError, *DAMAGED, KeyError, TypeError):
        # The result is part of other messages, so an incomplete record must not raise an error here.
        return ""


@contextmanager
def claimed(run_dir: Path) -> Iterator[None]:
    """Lock a run folder for one process. The operating system releases the lock when the process ends.

    Args:
        run_dir: folder to lock, created if missing.

    Raises:
        ConfigError: another process is writing to it.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with os.fdopen(open_regular(run_dir / LOCK, os.O_WRONLY | os.O_CREAT), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"hydra.run.dir={run_dir}: another process is writing to this run; wait for it to end, or "
                "start a new run in a folder of its own"
            ) from error
        yield


class ResumeRecord:
    """Hydra's record of one resumption: a folder inside the record of the original start.

    Args:
        run_dir: folder of the run that is resumed.

    Attributes:
        name: unused path for the record, relative to the run folder.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._before = self._results()
        number = 1
        while (run_dir / ".hydra" / f"{RESUMED}{number}").exists():
            number += 1
        self.name = f".hydra/{RESUMED}{number}"

    def undo(self) -> None:
        """Remove the record, unless the run has written anything since.

        The lock file stays. Another process may hold it by now, and a deleted lock file would exclude nobody.
        """
        record = self._run_dir / self.name
        if record.is_dir() and self._results() == self._before:
            for path in record.glob("*.yaml"):
                path.unlink()
            record.rmdir()

    def _results(self) -> dict[Path, tuple[int, int]]:
        """Return size and modification time of each result: not Hydra's records, logs or the lock file."""
        results = {}
        for path in self._run_dir.rglob("*"):
            if path.is_file() and path.suffix != ".log" and not {".hydra", LOCK} & set(path.parts):
                results[path] = (path.stat().st_size, path.stat().st_mtime_ns)
        return results


def remove_if_unused(run_dir: Path) -> None:
    """Remove a folder that this process created, if it contains only Hydra's records, logs and the lock file.

    Args:
        run_dir: folder that :func:`new_folder` returned to this process.
    """
    if not run_dir.is_dir() or run_dir.is_symlink():
        return
    records = [*run_dir.glob(".hydra/*.yaml"), *run_dir.glob("*.log"), *run_dir.glob(LOCK)]
    others = [path for path in run_dir.rglob("*") if path not in records and path != run_dir / ".hydra"]
    if others:
        return
    for path in records:
        path.unlink()
    for folder in (run_dir / ".hydra", run_dir):
        if folder.exists():
            folder.rmdir()


def _run_of(path: Path) -> Path:
    if path.name == "checkpoints":
        return path.parent
    if path.parent.name == "checkpoints":
        return path.parent.parent
    return path


def _checked(resume: str, run_dir: Path) -> Path:
    path = Path(resume)
    if resume != "auto" and path.parent.name == "checkpoints":
        complete = is_step(path.name) and (path / MANIFEST).is_file()
    else:
        complete = bool(complete_checkpoints(run_dir))
    if complete:
        return run_dir
    newest = "resume=auto"
    if resume == "auto":
        wrong = f"{run_dir} has no complete checkpoint to resume from"
        newest = "resume=auto without hydra.run.dir"
    elif path.exists():
        wrong = "it has no complete checkpoint to resume from"
    else:
        there = ", ".join(folder.name for folder in complete_checkpoints(run_dir))
        others = f"; complete checkpoints there: {there}" if there else ""
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        wrong = f"there is no such folder{where}{others}"
    raise CheckpointError(
        f"resume={resume}: {wrong}; write the path of a run folder that holds checkpoints/<step>, "
        f"{newest} for the run that wrote a checkpoint last, or resume=null for a new run"
    )


def _newest(outputs: Path) -> Path:
    """Find the run that wrote a checkpoint last. A run resumed today is newer than one started yesterday."""
    candidates = []
    for folder in outputs.glob("*/*"):
        checkpoints = complete_checkpoints(folder)
        if checkpoints:
            written = max((checkpoint / MANIFEST).stat().st_mtime_ns for checkpoint in checkpoints)
            candidates.append((written, folder))
    if not candidates:
        raise CheckpointError(
            f"resume=auto: no run below {outputs.resolve()} has a complete checkpoint; "
            "write resume=<a run folder> to continue another, or resume=null for a new run"
        )
    return max(candidates)[1]
