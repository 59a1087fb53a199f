"""Checks on this machine that a killed and resumed run equals the uninterrupted run.

``python -m torchrl_grpo.tools.verify_resume [--kills 5] [--seed 0] [overrides ...]``

runs the given configuration once to its end, then again with ``kill -9`` at random moments, one of them
while a checkpoint is written. ``resume=auto`` follows each kill. At the end every line of ``metrics.jsonl``,
``rollouts.jsonl`` and ``evaluations.jsonl`` must be equal except for timings. The exit code is 0 if they are,
else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchrl_grpo.runtime.files.closed_output import quiet_end
from torchrl_grpo.tools.processes import check, has_checkpoint, newest_step, started, work_folder

# Metrics that depend on a clock or the operating system. All others must be equal.
MEASURED = ("time/", "throughput/", "memory/")
DEFAULTS = (
    "--config-name=grpo_quickstart",
    "env.num_envs=4",
    "env.repeats=4",
    "inference_model.max_new_tokens=12",
    "train.total_dialog_turns=192",
    "train.optim_batch_size=8",
    "train.checkpoint_frequency=3",
    "eval.num_problems=8",
    "eval.frequency=5",
    "logging.progress=false",
)


class Kill(NamedTuple):
    """One kill.

    Attributes:
        step: newest step in ``metrics.jsonl`` when it happened.
        writing: whether a checkpoint was being written.
    """

    step: int
    writing: bool


def unmeasured(line: dict[str, Any]) -> dict[str, Any]:
    """A line of ``metrics.jsonl`` without metrics that depend on a clock."""
    return {name: value for name, value in line.items() if not name.startswith(MEASURED)}


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file, without metrics that depend on a clock."""
    return [unmeasured(json.loads(line)) for line in path.read_text().splitlines()]


def first_difference(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> str | None:
    """A sentence about the first unequal entry of two files, or None."""
    for entry, other in zip(left, right, strict=False):
        if entry != other:
            names = sorted(name for name in {*entry, *other} if entry.get(name) != other.get(name))
            name = names[0]
            pair = f"{entry.get(name)!r} in one and {other.get(name)!r} in the other"
            return f"step {entry.get('step')}: {name} is {pair}"
    if len(left) != len(right):
        return f"one has {len(left)} lines and the other {len(right)}"
    return None


def run_to_end(folder: Path, overrides: Sequence[str]) -> float:
    """Run the script in ``folder`` and return the seconds it took.

    Raises:
        SystemExit: it failed; its output is shown.
    """
    start = time.monotonic()
    with started(folder, overrides) as process:
        process.wait()
    check(folder, process)
    return time.monotonic() - start


def run_and_kill(
    folder: Path, overrides: Sequence[str], step: int, delay_s: float, inside_write: bool
) -> Kill | None:
    """Run the script in ``folder`` and kill it ``delay_s`` after ``step``, or in a checkpoint's write.

    Returns:
        The kill, or None when the run had ended before.
    """
    with started(folder, overrides) as process:
        reached: float | None = None
        while process.poll() is None:
            now = time.monotonic()
            if reached is None and newest_step(folder) >= step:
                reached = now
            if inside_write:
                due = reached is not None and _is_writing(folder) and has_checkpoint(folder)
            else:
                due = reached is not None and now - reached >= delay_s
            if due:
                process.kill()
                process.wait()
                return Kill(newest_step(folder), _is_writing(folder))
            # No event announces that a file grew; this wait also returns as soon as the process ends.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.02)
    check(folder, process)
    return None


def _is_writing(folder: Path) -> bool:
    return any((folder / "checkpoints").glob(".writing-*"))


def verify(overrides: Sequence[str], kills: int, seed: int, folder: Path) -> bool:
    """Compare an uninterrupted run with one killed ``kills`` times; see the module.

    Args:
        overrides: overrides of the configuration.
        kills: how often to kill, the first time inside a checkpoint's write.
        seed: seed of the moments.
        folder: folder that both runs write to.

    Returns:
        Whether every line is equal.
    """
    moments = random.Random(seed)
    whole, broken = folder / "uninterrupted", folder / "killed"
    seconds = run_to_end(whole, overrides)
    total = newest_step(whole)
    print(f"uninterrupted: {total} steps in {seconds:.0f} s", flush=True)
    pace = seconds / max(1, total)
    done = 0
    for number in range(kills):
        room = max(0, (total - newest_step(broken)) // (kills - number + 1))
        step = newest_step(broken) + moments.randint(0, room)
        kill = run_and_kill(broken, overrides, step, moments.uniform(0, 2 * pace), inside_write=number == 0)
        if kill is None:
            break
        done += 1
        where = "inside the write of a checkpoint" if kill.writing else "outside checkpoints"
        print(f"kill {number + 1}: after step {kill.step}, {where}", flush=True)
        if not has_checkpoint(broken):
            # Without a checkpoint a user would start again.
            shutil.rmtree(broken)
    run_to_end(broken, overrides)
    equal = True
    for name in ("metrics.jsonl", "rollouts.jsonl", "evaluations.jsonl"):
        left, right = read(whole / name), read(broken / name)
        difference = first_difference(left, right)
        equal = equal and difference is None
        print(
            f"{name}: {len(left)} lines, "
            + ("all equal" if difference is None else f"different: {difference}")
        )
    print(
        f"{done} kills: the resumed run " + ("equals" if equal else "DIFFERS FROM") + " the uninterrupted run"
    )
    return equal and done == kills


@quiet_end()
def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m torchrl_grpo.tools.verify_resume",
        description="Kill a run at random moments, resume it, and compare it with an uninterrupted one.",
    )
    parser.add_argument("--kills", type=int, default=5, help="number of kills (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments (default 0)")
    parser.add_argument("--folder", type=Path, help="keep both runs here instead of in a temporary folder")
    parser.add_argument(
        "overrides",
        nargs="*",
        help=f"of the configuration, after those of the check itself: {' '.join(DEFAULTS)}",
    )
    args = parser.parse_args(argv)
    if args.kills < 1:
        parser.error(f"--kills {args.kills}: write at least 1")
    folder = work_folder(parser, args.folder, "verify-resume-")
    equal = verify([*DEFAULTS, *args.overrides], args.kills, args.seed, folder)
    if args.folder is None and equal:
        shutil.rmtree(folder)
    else:
        print(f"both runs are in {folder}")
    return 0 if equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
