"""Checks on this machine that asynchronous runs survive the death of their processes.

``python -m torchrl_grpo.tools.soak [--kills 20] [--seed 0] [overrides ...]``

runs ``grpo-async.py`` and, at random moments, kills with signal 9 one of: a rollout worker; the trainer, with
its buffer; Ray's node process, with the object store. A run without its trainer is resumed. The check holds
if

* the run took every step, and trained on each group once;
* its counts add up: issued = trained + dropped + left;
* no process and no shared memory of any trainer is left.

The exit code is 0 if the check holds, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

from torchrl_grpo.runtime.files.closed_output import quiet_end
from torchrl_grpo.runtime.shared_memory import abandoned
from torchrl_grpo.tools.processes import check, family, has_checkpoint, newest_step, started, work_folder

DEFAULTS = (
    "--config-name=grpo_quickstart",
    "collector.max_policy_age=2",
    "collector.max_restarts=1000",
    "inference_model.num_devices=2",
    "train.checkpoint_frequency=1",
    "logging.progress=false",
)
SCRIPT = "grpo-async.py"
KINDS = ("worker", "trainer", "node")
# Prefixes of the command lines of these processes.
_COMMANDS = {"worker": "ray::RolloutActor", "node": "--raylet_socket_name="}
# Two of Ray's helpers try for a minute to report that their node was killed. The next run does not wait.
_LINGER_S = 90.0


def victim(pid: int, kind: str, moments: random.Random) -> psutil.Process | None:
    """Return a process of this kind that belongs to the trainer ``pid``; None while there is none."""
    if kind == "trainer":
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(pid)
        return None
    matches = []
    for process in family(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            argv = process.cmdline()
            at = {"worker": argv[:1], "node": argv[1:2]}[kind]
            if at and at[0].startswith(_COMMANDS[kind]):
                matches.append(process)
    return moments.choice(matches) if matches else None


def kill_at_random(
    folder: Path,
    overrides: Sequence[str],
    moments: random.Random,
    left: int,
    longest_s: float,
    seen: set[psutil.Process],
) -> tuple[Counter[str], bool]:
    """Run until the trainer is killed or ends.

    Args:
        folder: folder of the run.
        overrides: overrides of the configuration.
        moments: generator that draws victims and moments.
        left: largest number of kills.
        longest_s: longest time between two kills, in seconds.
        seen: set that gets the processes below the trainer.

    Returns:
        Kills by kind, and whether the trainer ended by itself.

    Raises:
        SystemExit: the run failed without a kill.
    """
    kills: Counter[str] = Counter()
    with started(folder, overrides, SCRIPT) as process:
        due, kind = time.monotonic() + moments.uniform(0, longest_s), moments.choice(KINDS)
        while process.poll() is None:
            seen.update(family(process.pid))
            if sum(kills.values()) < left and time.monotonic() >= due and (folder / "metrics.jsonl").exists():
                target = victim(process.pid, kind, moments)
                if target is not None:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        target.kill()
                        kills[kind] += 1
                        print(f"killed: {kind}, after step {newest_step(folder)}", flush=True)
                    due, kind = time.monotonic() + moments.uniform(0, longest_s), moments.choice(KINDS)
                elif time.monotonic() >= due + longest_s:
                    # A run on somebody else's cluster has no process of a node.
                    kind = moments.choice(KINDS)
            # No event announces a process to kill; this wait also returns as soon as the trainer ends.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.1)
    ended = process.returncode == 0
    if not ended and not (kills["trainer"] or kills["node"]):
        check(folder, process)
    return kills, ended


def wait_for_all(processes: Iterable[psutil.Process]) -> None:
    """Wait until processes of runs have ended.

    Raises:
        SystemExit: some have not, and are killed.
    """
    _, alive = psutil.wait_procs(processes, timeout=_LINGER_S)
    if alive:
        names = []
        for member in alive:
            # It may end at any moment.
            with contextlib.suppress(psutil.NoSuchProcess):
                names.append(" ".join(member.cmdline())[:80])
                member.kill()
        raise SystemExit(f"left behind: {', '.join(names) or 'processes that have ended since'}")


def soak(overrides: Sequence[str], kills: int, seed: int, folder: Path, longest_s: float) -> bool:
    """Run and kill as the module describes; return whether the check holds."""
    moments = random.Random(seed)
    before = abandoned()
    run = folder / "run"
    done: Counter[str] = Counter()
    seen: set[psutil.Process] = set()
    ended = False
    while not ended:
        more, ended = kill_at_random(run, overrides, moments, kills - sum(done.values()), longest_s, seen)
        done += more
        if not ended and not has_checkpoint(run) and run.exists():
            # Without a checkpoint a user would start again.
            shutil.rmtree(run)
    wait_for_all(seen)
    summary = json.loads((run / "summary.json").read_text())
    counts = summary["groups"]
    rows = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    each = Counter(row["group_id"] for row in rows)
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    findings = {
        "every kill happened": sum(done.values()) == kills,
        "issued = trained + dropped + left": counts["issued"]
        == counts["trained"] + counts["dropped_age"] + counts["dropped_filter"] + counts["left"],
        "every group was trained on once": len(each) == counts["trained"] and len(set(each.values())) == 1,
        "every step was logged once": steps == sorted(set(steps)) and steps[-1] == summary["steps"],
        "no shared memory is left": not (abandoned() - before),
    }
    print(
        f"{sum(done.values())} kills: {dict(done)}; groups: {counts}; restarts: {summary['worker_restarts']}"
    )
    print(f"held-out accuracy: {summary['accuracy_before']} -> {summary['accuracy_after']}")
    for what, holds in findings.items():
        print(f"{'holds' if holds else 'FAILS'}: {what}")
    return all(findings.values())


@quiet_end()
def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m torchrl_grpo.tools.soak",
        description="Kill processes of an asynchronous run at random moments, and check that it recovers.",
    )
    parser.add_argument("--kills", type=int, default=20, help="number of kills (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="seed of moments and victims (default 0)")
    parser.add_argument(
        "--longest", type=float, default=40.0, help="longest time between two kills, in seconds"
    )
    parser.add_argument("--folder", type=Path, help="keep the run here instead of in a temporary folder")
    parser.add_argument(
        "overrides",
        nargs="*",
        help=f"of the configuration, after those of the check itself: {' '.join(DEFAULTS)}",
    )
    args = parser.parse_args(argv)
    folder = work_folder(parser, args.folder, "soak-")
    holds = soak([*DEFAULTS, *args.overrides], args.kills, args.seed, folder, args.longest)
    if args.folder is None and holds:
        shutil.rmtree(folder)
    else:
        print(f"the run is in {folder}")
    return 0 if holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
