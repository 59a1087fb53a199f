"""``python -m benchmarks.checkpoints``: by how much a checkpoint delays the next step.

Each pair has three steps of the run of :mod:`benchmarks.workers.ours`: one without a checkpoint, one after a
checkpoint that was waited for and went through the page cache, as before a thread wrote it past that, and one
beside the writing of its checkpoint, as in a run. A delay is what the call and the step after it take longer
than the first step.
"""

from __future__ import annotations

import argparse
import atexit
import shutil
import time
from collections.abc import Callable
from unittest.mock import patch

from benchmarks.pairs import Spread
from benchmarks.workers.ours import begin
from benchmarks.workload import Workload, use_all_cores
from torchrl_grpo.checkpoints import background
from torchrl_grpo.config.schema import ModelConfig
from torchrl_grpo.models import loading
from torchrl_grpo.runtime.files import direct_file
from torchrl_grpo.training.loop import step


def main() -> None:
    """Print the delays of each pair, and the spread of their ratio."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoints", description=__doc__)
    parser.add_argument("--pairs", type=int, default=5, help="measured pairs (default: 5)")
    parser.add_argument("--prompts", type=int, default=8, help="prompts of a step (default: 8)")
    parser.add_argument("--model", default="smollm2-135m", help="model, as model.name of a run")
    parser.add_argument("--backend", default="vllm", help="inference_model.backend (default: vllm)")
    options = parser.parse_args()
    use_all_cores()
    settings = {"inference_model.backend": options.backend, "inference_model.enforce_eager": True}
    model = str(loading.resolve(ModelConfig(name=options.model)))
    run = begin(Workload(model, options.prompts, autocast="bf16", settings=settings))
    # Checkpoints take gigabytes.
    atexit.register(shutil.rmtree, run.outputs.run_dir, ignore_errors=True)
    writer = run.checkpoints.writer

    def seconds(before: Callable[[], object]) -> float:
        started = time.perf_counter()
        before()
        step(run)
        return time.perf_counter() - started

    def save_and_wait() -> None:
        with patch.object(background, "_NICENESS", 0), patch.object(direct_file, "_DIRECT", 0):
            run.save()
            writer.finish()

    step(run)
    save_and_wait()
    rows: list[tuple[float, float, float, float]] = []
    for number in range(1, options.pairs + 1):
        plain, waiting, beside = seconds(lambda: None), seconds(save_and_wait), seconds(run.save)
        started = time.perf_counter()
        writer.finish()
        rows.append((plain, waiting - plain, beside - plain, time.perf_counter() - started))
        print(
            f"pair {number} of {options.pairs}: a step {plain:.2f} s, delayed by {rows[-1][1]:.2f} s if it "
            f"waits and by {rows[-1][2]:.2f} s if not; written {rows[-1][3]:.2f} s after it",
            flush=True,
        )
    names = ("step", "delay of a step that waits", "delay beside the write", "rest of the write after it")
    for name, column in zip(names, zip(*rows, strict=True), strict=True):
        print(f"{name}: {Spread.of(list(column)).show()} s")
    print(f"ratio of the delays: {Spread.of([row[2] / row[1] for row in rows]).show()}")


if __name__ == "__main__":
    main()
