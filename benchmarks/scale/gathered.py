"""Log-probabilities that rank 0 gets from the other training ranks.

``python -m benchmarks.scale.gathered GROUPS`` is a rank.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.scale.parts import Part, total
from torchrl_grpo.distributed.ranks import Ranks
from torchrl_grpo.runtime import rank_env

_GROUPS, _SAMPLES, _TOKENS = 256, 8, 1_000
_LIMIT_S = 120.0


def _over_loopback() -> int:
    """Return how many bytes have crossed the loopback device of this machine."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[0])
    raise RuntimeError("/proc/net/dev has no loopback device")


def _gathered(ranks: int) -> float:
    """Return how many MB cross the loopback device for the log-probabilities of a round."""
    shared = {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(rank_env.free_port()),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", __name__, str(_GROUPS // ranks)]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            started.append(subprocess.Popen(command, env=own, stdout=subprocess.PIPE if rank == 0 else None))
        output, _ = started[0].communicate(timeout=_LIMIT_S)
        if started[0].returncode:
            raise RuntimeError(f"rank 0 of {ranks} ended with code {started[0].returncode}")
        return int(output) / 1e6
    finally:
        for process in started:
            process.kill()
            process.wait()


def main() -> None:
    """Give rank 0 this rank's share, and print on rank 0 what that moved."""
    ranks = Ranks(on_cpu=True)
    own = [torch.randn(_SAMPLES, _TOKENS) for _ in range(int(sys.argv[1]))]
    # Every rank is there, and connected.
    ranks.gather_to_main(None)
    before = _over_loopback()
    ranks.gather_to_main(own)
    if ranks.is_main:
        print(_over_loopback() - before, flush=True)


PARTS = {
    "gathered": Part(
        "8.2 MB of log-probabilities of all ranks to rank 0", "ranks",
        (2, 8), _gathered, total, "MB over loopback",
    ),
}  # fmt: skip

if __name__ == "__main__":
    main()
