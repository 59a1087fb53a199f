"""Protocol between the benchmark and a worker: one line in, one step, one line of JSON out.

Each worker has its own process, so that libraries do not share settings of threads, caches and hooks. It
waits on its standard input, which costs nothing while another worker is measured.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from types import TracebackType
from typing import Any

from benchmarks.waking import touch_memory
from benchmarks.workload import Workload, settle
from torchrl_grpo.planning.cores import PASSIVE_WAIT_ENV

# Environment variable with the pipe for answers. Stdout is not used, because libraries print to it.
_ANSWERS = "BENCH_ANSWERS"
_ROOT = Path(__file__).resolve().parents[1]


def serve(build: Callable[[Workload], Callable[[], dict[str, float]]]) -> None:
    """Run as a worker: build, report readiness, then take one step per input line.

    Before each step, and outside of its time, the worker reads its own memory, so that waiting does not slow
    the step down.

    Args:
        build: function from the workload to a step function. The step function returns a dictionary with the
            seconds of ``train`` and, unless it trains on recorded rollouts, the seconds of ``generate`` and
            ``prompt_tokens``, the mean length of a prompt as the model saw it.
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

    # Memory that PyTorch reserved on the GPU if one is used, else the memory of the process.
    return peak_cuda_gib() or peak_memory_gib()


class Worker:
    """The process of a worker.

    Args:
        name: name of a module in :mod:`benchmarks.workers`.
        workload: workload of a step.

    Raises:
        RuntimeError: the worker exited before it was ready.
    """

    def __init__(self, name: str, workload: Workload) -> None:
        self.name = name
        # The same for all workers: spinning threads of one would slow the others down.
        environment = {**os.environ, **PASSIVE_WAIT_ENV, "TOKENIZERS_PARALLELISM": "false"}
        # Only one GPU, because libraries use several in different ways.
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        reading, writing = os.pipe()
        self._answers = os.fdopen(reading)
        self._process = Popen(
            [sys.executable, "-m", f"benchmarks.workers.{name}", workload.to_json()],
            stdin=PIPE,
            stdout=sys.__stderr__,
            text=True,
            cwd=_ROOT,
            env={**environment, _ANSWERS: str(writing)},
            pass_fds=[writing],
        )
        os.close(writing)
        self._answer()

    def step(self) -> dict[str, Any]:
        """Take a step; returns seconds by phase, the total ``seconds``, and the peak ``peak_gib`` so far.

        Raises:
            RuntimeError: the worker exited.
        """
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise RuntimeError(
                f"the worker {self.name} exited with status {self._process.wait()}; its output is above"
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
        except TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()
