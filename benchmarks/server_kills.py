"""``python -m benchmarks.server_kills``: kill real servers of a run at random moments, and count its groups.

The run is a command of its own. Its servers are killed with their children, as the system does when memory
runs out. At the end every group must have been trained once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil

_PROGRAM = "torchrl_grpo.inference.servers.vllm.program"
_ROOT = Path(__file__).resolve().parents[1]


def _servers(run: psutil.Process) -> list[psutil.Process]:
    """Return the first process of each server that listens."""
    servers = []
    for process in run.children(recursive=False):
        try:
            words = process.cmdline()
            if _PROGRAM in words and Path(words[words.index("--uds") + 1]).is_socket():
                servers.append(process)
        except psutil.Error:
            continue
    return servers


def _command(args: argparse.Namespace, folder: Path) -> list[str]:
    script = "grpo-async.py" if args.asynchronous else "grpo.py"
    groups = args.groups
    return [
        sys.executable,
        str(_ROOT / "sota-implementations" / "grpo" / script),
        "--config-name=grpo_quickstart",
        f"hydra.run.dir={folder}",
        f"model.name={args.model}",
        "inference_model.backend=vllm_server",
        "inference_model.num_devices=2",
        "inference_model.num_threads=1",
        f"inference_model.max_new_tokens={args.tokens}",
        "env.num_envs=4",
        "env.repeats=4",
        f"train.total_dialog_turns={groups * 4}",
        "eval.num_problems=0",
        "eval.frequency=0",
        "collector.max_restarts=100",
        "train.checkpoint_frequency=0",
        *args.words,
    ]


def main() -> None:
    """Run, kill, and report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.server_kills")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--groups", type=int, default=400, help="more than the run trains before the last kill"
    )
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("words", nargs="*", help="further words of the command")
    args = parser.parse_intermixed_args()
    moments = random.Random(args.seed)
    run = subprocess.Popen(_command(args, args.folder))
    watched = psutil.Process(run.pid)
    kills = 0
    responses = args.folder / "rollouts.jsonl"
    while kills < args.kills and run.poll() is None:
        # A server that does not start at all ends the run.
        has_begun = responses.exists() and responses.stat().st_size
        alive = _servers(watched) if has_begun else []
        if not alive:
            # Nobody tells this process when a server listens.
            time.sleep(0.2)
            continue
        # Updates and generations take seconds, so a moment lies in either.
        time.sleep(moments.uniform(0.0, 6.0))
        victim = moments.choice(alive)
        try:
            os.killpg(victim.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        kills += 1
        print(f"kill {kills} of {args.kills}", flush=True)
        # A killed server is a zombie until the run notices it.
        psutil.wait_procs([victim], timeout=60)
    code = run.wait()
    summary = json.loads((args.folder / "summary.json").read_text())
    lines = (args.folder / "rollouts.jsonl").read_text().splitlines()
    sizes = Counter(json.loads(line)["group_id"] for line in lines)
    groups = summary["groups"]
    ended = groups["trained"] + groups["dropped_age"] + groups["dropped_filter"] + groups["left"]
    whole = sum(size == 4 for size in sizes.values())
    print(
        f"exit {code}, {kills} kills, {summary['worker_restarts']} workers replaced; groups: {groups}; "
        f"{len(sizes)} different groups in rollouts.jsonl, {whole} of them with 4 responses"
    )
    if (
        code
        or kills < args.kills
        or groups["issued"] != ended
        or not whole == len(sizes) == groups["trained"]
    ):
        sys.exit("groups were lost or doubled, or fewer servers were killed")


if __name__ == "__main__":
    main()
