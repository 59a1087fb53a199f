"""``grpo-sweep``: compare the settings of a sweep from the files of its trials."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torchrl_grpo.cli.arguments import Parser
from torchrl_grpo.cli.endings import run_tool
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.observe.metrics import METRICS
from torchrl_grpo.runtime.printable import printable


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command: see :func:`~torchrl_grpo.cli.endings.run_tool`."""
    run_tool(_parser(), _run, argv)


def _run(args: argparse.Namespace) -> None:
    if not any(args.sweep.glob(f"*/{METRICS}")):
        raise ConfigError(
            f"SWEEP={args.sweep}: no folder in it has {METRICS}, so it is no folder of a sweep; write a "
            "folder such as multirun/2026-01-31/10-30-00"
        )
    show(args.sweep, args.baseline)


def show_if_compared(folder: Path) -> None:
    """Do what :func:`show` does at the end of a sweep, if it has at least two trials.

    Raises:
        ConfigError: a file cannot be written.
    """
    if len([*folder.glob(f"*/{METRICS}")]) > 1:
        sys.stdout.write("\n")
        show(folder)


def show(folder: Path, baseline: str | None = None) -> None:
    """Write ``sweep.json`` and ``sweep.html`` of a sweep, and print which setting won.

    Args:
        folder: folder of the sweep.
        baseline: name of the setting that the others are compared with; None for the first with a mean.

    Raises:
        ConfigError: there is no such setting, or a file cannot be written.
    """
    from torchrl_grpo.sweep import page, results
    from torchrl_grpo.sweep.trials import read_sweep

    try:
        trials = read_sweep(folder)
        entries = results.results(trials, baseline)
        results.write(folder, entries)
        path = page.write(folder, trials, entries)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or folder}: {error.strerror or error}; make room or let this user write "
            "there, or run grpo-sweep on a copy of the folder"
        ) from error
    sys.stdout.write("".join(f"{printable(line)}\n" for line in results.screen(entries).splitlines()))
    sys.stdout.write(f"\nWritten to {path.resolve()} and {results.RESULTS}\n")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="grpo-sweep",
        description="Compare the settings of a sweep: means over seeds, paired differences to the "
        "baseline, and how many more seeds are needed. It may still be going on.",
    )
    parser.add_argument(
        "sweep", metavar="SWEEP", type=Path, help="folder of a sweep, such as multirun/DATE/TIME"
    )
    parser.add_argument(
        "--baseline",
        metavar="SETTING",
        help="setting to compare with, as the table names it (by default the first that has a mean)",
    )
    return parser
