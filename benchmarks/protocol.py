"""How the benchmark talks to a worker: a line in, one step, a line of JSON out.

A worker sits in its own process, so that no library meets another's settings of threads, caches and hooks,
and waits on its standard input, which costs nothing while another one is measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.waking import touch_memory
from benchmarks.workload import Workload, settle
from torchrl_grpo.planning.cores import WAITING

# Names the pipe that answers go into: libraries print to the usual ones, some while they are imported.
_ANSWERS = "BENCH_ANSWERS"
_ROOT = Path(__file__).resolve().parents[1]


def serve(build: Callable[[Workload], Callable[[], dict[str, float]]]) -> None:
    """Run as a worker: build, say so, then take a step for every line that comes in.

    Before each the worker's own memory is read, outside the step's time: waiting makes it no slower.

    Args:
        build: from the workload to a function that takes one step and returns seconds by phase, at least
            ``train`` and, unless rollouts are recorded, ``generate`` and ``prompt_tokens``, the mean length
            of a prompt as the model saw it.
    """
    answers = os.fdopen(int(os.environ[_ANSWERS]), "w")
    step = build(Workload.from_json(sys.argv[1]))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for _ in sys.stdin:
        touch_memory()
        started = time.perf_counter()
        phases = step()
        settle()
        seconds = time.perf_counter() - started
        print(json.dumps({"seconds": seconds, **phases, "peak_gib": _peak()}), file=answers, flush=True)


def _peak() -> float:
    from torchrl_grpo.observe.stats import peak_cuda_gib, peak_memory_gib

    # What PyTorch reserved of the GPU where one is used; the process's otherwise.
    return peak_cuda_gib() or peak_memory_gib()


class Worker:
    """A worker's process.

    Args:
        name: module in :mod:`benchmarks.workers`.
        workload: what its steps do.
    """

    def __init__(self, name: str, workload: Workload) -> None:
        self.name = name
        # The same for all: threads that spin for long would be measured in whoever runs beside them.
        environment = {**os.environ, **WAITING, "TOKENIZERS_PARALLELISM": "false"}
        # Several GPUs would be shared out by each library's own rule: what is compared is one.
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        reading, writing = os.pipe()
        self._answers = os.fdopen(reading)
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.workers.{name}", workload.to_json()],
            stdin=subprocess.PIPE,
            stdout=sys.__stderr__,
            text=True,
            cwd=_ROOT,
            env={**environment, _ANSWERS: str(writing)},
            pass_fds=[writing],
        )
        os.close(writing)
        self._answer()

    def step(self) -> dict[str, Any]:
        """Seconds by phase of one step, all of it as ``seconds``, and the peak memory so far in GiB."""
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise RuntimeError(
                f"the worker {self.name} ended with exit status {self._process.wait()}; what it said is above"
            )
        return dict(json.loads(line))

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()
