"""``grpo-report``: write the report of a run from its files, or show that of a run in progress."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torchrl_grpo.cli.arguments import Parser
from torchrl_grpo.cli.endings import exit_codes
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.observe.metrics import METRICS
from torchrl_grpo.observe.report import PAGE
from torchrl_grpo.runtime.files.closed_output import quiet_end
from torchrl_grpo.runtime.package_versions import VERSION


@quiet_end()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command.

    Args:
        argv: arguments; those of this process by default.

    Raises:
        SystemExit: with code 2 for a user error, 130 for an interrupt, 143 for SIGTERM.
    """
    with exit_codes():
        args = _parser().parse_args(argv)
        _check(args.run)
        if args.watch:
            _watch(args.run, args.port)
        else:
            _write(args.run)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="grpo-report",
        allow_abbrev=False,
        description="Write report.html of a run from its files: curves, rollouts, the history of each "
        "problem, findings. It is one file, and a browser shows it without a network.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a run, such as outputs/DATE/TIME")
    parser.add_argument(
        "--watch",
        action="store_true",
        help="serve the report on this machine, and reload it while the run goes on",
    )
    parser.add_argument("--port", type=int, default=0, help="port of --watch (a free one by default)")
    parser.add_argument("--version", action="version", version=f"torchrl-grpo {VERSION}")
    return parser


def _check(run: Path) -> None:
    if not (run / METRICS).is_file():
        raise ConfigError(
            f"RUN={run}: there is no {METRICS}, so it is no folder of a run; write a folder such as "
            "outputs/2026-01-31/10-30-00"
        )


def _write(run: Path) -> None:
    from torchrl_grpo.report.reader import RunReader
    from torchrl_grpo.report.write import write

    reader = RunReader(run)
    try:
        reader.update()
    except OSError as error:
        raise ConfigError(
            f"{error.filename or run} cannot be read: {error.strerror or error}; let this user read it, or "
            "run grpo-report on a copy of the folder without it"
        ) from error
    try:
        path = write(reader)
    except OSError as error:
        raise ConfigError(
            f"{run / PAGE} cannot be written: {error.strerror or error}; make room or let this user "
            "write there, or run grpo-report on a copy of the folder"
        ) from error
    size = path.stat().st_size / 2**20
    sys.stdout.write(f"Written to {path.resolve()} ({size:.1f} MiB)\n")


def _watch(run: Path, port: int) -> None:
    from torchrl_grpo.report.serve import ReportServer

    if not 0 <= port < 2**16:
        raise ConfigError(f"--port={port}: ports are 0 to 65535; leave --port out for a free one")
    try:
        server = ReportServer(run, port)
    except OSError as error:
        raise ConfigError(
            f"--port={port}: {error.strerror or error}; leave --port out for a free one"
        ) from error
    with server:
        sys.stdout.write(f"The report of {run} is at {server.url} until Ctrl+C.\n")
        sys.stdout.flush()
        server.serve_forever()
