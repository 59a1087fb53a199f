"""``grpo-report``: write the report of a run, or what differs between runs, from their files.

It also shows the report of a run in progress.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torchrl_grpo.cli.arguments import Parser
from torchrl_grpo.cli.endings import run_tool
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.observe.metrics import METRICS
from torchrl_grpo.observe.report import PAGE
from torchrl_grpo.runtime.printable import printable

DIFFERENCES = "report-diff.html"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command: see :func:`~torchrl_grpo.cli.endings.run_tool`."""
    run_tool(_parser(), _run, argv)


def _run(args: argparse.Namespace) -> None:
    _check(args)
    if args.watch:
        _watch(args.runs[0], args.port)
    elif len(args.runs) == 1:
        _write(args.runs[0], args.output)
    else:
        _compare(args.runs, args.output or Path(DIFFERENCES))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="grpo-report",
        description="Write report.html of a run from its files: curves, rollouts, the history of each "
        "problem, findings. Of several runs, write what differs: configuration, curves, and results on the "
        "same held-out problems, each run compared with the first. It is one file, and a browser shows it "
        "without a network.",
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", type=Path, help="folder of a run, such as outputs/DATE/TIME"
    )
    parser.add_argument(
        "--output",
        metavar="FILE.html",
        type=Path,
        help=f"file to write ({PAGE} in the folder of the run by default, and {DIFFERENCES} in the current "
        "folder for several runs)",
    )
    parser.add_argument(
        "--watch",
        action="store_true",
        help="serve the report on this machine, and reload it while the run goes on",
    )
    parser.add_argument("--port", type=int, default=0, help="port of --watch (a free one by default)")
    return parser


def _check(args: argparse.Namespace) -> None:
    for number, run in enumerate(args.runs):
        if not (run / METRICS).is_file():
            raise ConfigError(
                f"RUN={run}: there is no {METRICS}, so it is no folder of a run; write a folder such as "
                "outputs/2026-01-31/10-30-00"
            )
        if run.resolve() in [other.resolve() for other in args.runs[:number]]:
            raise ConfigError(f"RUN={run}: this run is named twice; name another one, or none for its report")
    if args.watch and len(args.runs) > 1:
        raise ConfigError("--watch: it shows one run; name only that one, or leave --watch out")
    if args.watch and args.output is not None:
        raise ConfigError(f"--output={args.output}: --watch writes no file; leave one of the two out")
    if args.output is not None and args.output.suffix != ".html":
        raise ConfigError(f"--output={args.output}: a report is HTML; write a name that ends in .html")


def _write(run: Path, output: Path | None) -> None:
    from torchrl_grpo.report.reader import RunReader
    from torchrl_grpo.report.write import write

    reader = RunReader(run)
    with _reading(run):
        reader.update()
    path = run / PAGE if output is None else output
    with _writing(path):
        write(reader, path)
    _note(run, reader.notes)
    _tell(path)


def _compare(runs: Sequence[Path], path: Path) -> None:
    from torchrl_grpo.report.differences import compare, read_runs
    from torchrl_grpo.report.differences_text import lines
    from torchrl_grpo.report.page_file import render
    from torchrl_grpo.runtime.files.shared_files import replace

    with _reading(runs[0]):
        contents = read_runs(runs)
        differences = compare(runs, contents)
    sys.stdout.write("".join(f"{printable(line)}\n" for line in lines(contents, differences)))
    for run, content in zip(runs, contents, strict=True):
        _note(run, content["notes"])
    with _writing(path):
        replace(path, render(contents, differences=differences))
    _tell(path)


@contextmanager
def _reading(run: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{error.filename or run} cannot be read: {error.strerror or error}; let this user read it, or "
            "run grpo-report on a copy of the folder without it"
        ) from error


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror or error}; make room or let this user write there, "
            "or write another file with --output"
        ) from error


def _note(run: Path, notes: Sequence[str]) -> None:
    sys.stdout.write("".join(printable(f"note: {run}: {note}") + "\n" for note in notes))


def _tell(path: Path) -> None:
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
