"""``grpo-doctor``: say what went wrong in a run, from its files, or check a machine before a run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from torchrl_grpo.cli.arguments import Parser
from torchrl_grpo.cli.endings import run_tool
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.observe.doctor import Diagnosis, diagnose
from torchrl_grpo.observe.metrics import jsonable
from torchrl_grpo.runtime.printable import printable
from torchrl_grpo.tools.gpu_check.results import Status

FOUND_CODE = 1
# An evaluation of four problems starts an engine, and publishes weights to it.
_SHORT = ("eval.num_problems=4", "logging.progress=false")
# Characters of a response that are shown.
_SHOWN = 300


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command: see :func:`~torchrl_grpo.cli.endings.run_tool`."""
    run_tool(_parser(), _run, argv)


def _run(args: argparse.Namespace) -> None:
    if args.machine:
        raise SystemExit(_check_machine(args.words, args.json))
    if len(args.words) != 1:
        raise ConfigError("command line: name the folder of one run, or write --machine")
    diagnosis = diagnose(args.words[0])
    if args.json:
        sys.stdout.write(json.dumps(jsonable(entries(diagnosis)), indent=2) + "\n")
    else:
        sys.stdout.write("".join(f"{printable(line)}\n" for line in lines(diagnosis)))
    raise SystemExit(FOUND_CODE if diagnosis.findings else 0)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="grpo-doctor",
        description="Say what went wrong in a run, from its files: what was seen, since which step, the "
        "cause, and the keys to change.",
        epilog="Exit code: 0 if nothing was found, 1 if something was, 2 for a mistake in the command.",
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="RUN",
        help="folder of a run, which may still be going on; with --machine, keys of the engine as KEY=VALUE",
    )
    parser.add_argument(
        "--machine",
        action="store_true",
        help="check this machine before a run: versions, GPUs, shared memory, disk, ports, ranks, engine",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _check_machine(words: Sequence[str], as_json: bool) -> int:
    """Check the machine, and return the exit code."""
    from torchrl_grpo.cli.checked_job import compose_job
    from torchrl_grpo.tools import machine_check

    cfg = compose_job([*_SHORT, *words], "grpo_quickstart", None)
    results = []
    for name, check in machine_check.checks(cfg).items():
        result = machine_check.run_check(name, check)
        results.append(result)
        if not as_json:
            text = result.reason or result.figures["ok"]
            sys.stdout.write(printable(f"{name:<13}  {result.status:<6}  {text}") + "\n")
            sys.stdout.flush()
    if as_json:
        sys.stdout.write(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    return FOUND_CODE if any(result.status is Status.failed for result in results) else 0


def entries(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return what ``--json`` prints."""
    rows = []
    for finding in diagnosis.findings:
        rule, example = finding.rule, diagnosis.examples.get(finding.rule.name)
        rows.append(
            {
                "rule": rule.name,
                "seen": finding.seen,
                "since": finding.since,
                "step": finding.step,
                "is_over": finding.is_over,
                "advice": rule.advice,
                "keys": rule.keys,
                "metrics": rule.reads,
                "source": rule.source,
                "example": None if example is None else vars(example),
            }
        )
    whole = {"last_step": diagnosis.last_step, "ended": diagnosis.ended, "damaged_lines": diagnosis.damaged}
    return {"findings": rows, **whole, "notes": diagnosis.notes}


def lines(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield what is printed, a line at a time. Texts of the model are as it wrote them."""
    for finding in diagnosis.findings:
        rule, example = finding.rule, diagnosis.examples.get(finding.rule.name)
        end = "; it is over" if finding.is_over else ""
        yield f"{rule.name}: {finding.seen}"
        yield f"  when    since step {finding.since}, warned at step {finding.step}{end}"
        yield f"  fix     {rule.advice}"
        yield f"  source  {rule.source}"
        if example is not None:
            what = f"error {example.error!r}" if example.error else f"reward {example.reward}"
            text = example.response[:_SHOWN] + ("..." if len(example.response) > _SHOWN else "")
            yield f"  seen in {example.file}, step {example.step}, {what}: {text!r}"
    for name, count in diagnosis.damaged.items():
        yield f"note: {name}: {count} damaged lines were skipped"
    yield from (f"note: {note}" for note in diagnosis.notes)
    state = "has ended" if diagnosis.ended else "has not ended, or was stopped (there is no summary.json)"
    last = "none" if diagnosis.last_step is None else diagnosis.last_step
    yield f"{len(diagnosis.findings)} findings; last step {last}; the run {state}"
