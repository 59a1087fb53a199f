"""Starts runs as a user does, for checks that watch and kill them from outside."""

from __future__ import annotations

import contextlib
import json
import sys
import sysconfig
import tempfile
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import STDOUT, Popen

import psutil

_SCRIPTS = Path(__file__).resolve().parents[2] / "sota-implementations" / "grpo"
_COMMANDS = Path(sysconfig.get_path("scripts"))


@contextlib.contextmanager
def started(folder: Path, overrides: Sequence[str], script: str = "grpo.py") -> Iterator[Popen[bytes]]:
    """Start the script in ``folder``; resume if there is a checkpoint.

    Its output goes to a file: a full pipe that nobody reads would block it.
    """
    resume = ["resume=auto"] if has_checkpoint(folder) else []
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(program(script)), *overrides, f"hydra.run.dir={folder}", *resume]
    with _output(folder).open("wb") as output:
        yield Popen(command, stdout=output, stderr=STDOUT)


def family(pid: int) -> list[psutil.Process]:
    """Return the processes below the process with this id."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return list(psutil.Process(pid).children(recursive=True))
    return []


def work_folder(parser: ArgumentParser, chosen: Path | None, prefix: str) -> Path:
    """Return the folder that ``--folder`` names, or a new one; end with a message if it cannot be written."""
    folder = chosen or Path(tempfile.mkdtemp(prefix=prefix))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder.resolve()
    except OSError as error:
        parser.error(f"--folder {folder}: cannot be written ({error.strerror}); name another folder")


def check(folder: Path, process: Popen[bytes]) -> None:
    """Show the output of a run that failed.

    Raises:
        SystemExit: the run failed.
    """
    if process.returncode:
        sys.stderr.write(_output(folder).read_text(errors="replace"))
        raise SystemExit(f"the run in {folder} failed with exit code {process.returncode}")


def newest_step(folder: Path) -> int:
    """The step of the last whole line of ``metrics.jsonl``; 0 without one."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return 0
    lines = path.read_text().rpartition("\n")[0].splitlines()
    return int(json.loads(lines[-1])["step"]) if lines else 0


def has_checkpoint(folder: Path) -> bool:
    """Whether there is a complete checkpoint."""
    return any((folder / "checkpoints").glob("[0-9]*/manifest.json"))


def program(script: str) -> Path:
    """The script of a checkout, or the command that a wheel installs for it."""
    return _SCRIPTS / script if _SCRIPTS.is_dir() else _COMMANDS / script.removesuffix(".py")


def _output(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.log")
