"""``python -m benchmarks``: run the comparisons and write ``benchmarks/RESULTS.md``.

Each part is measured in one run, its two sides in turn; what is compared is a ratio, since machines differ
and are shared. A part that was measured before keeps its section until it is measured again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import memory, results
from benchmarks.pairs import compare
from benchmarks.protocol import Worker
from benchmarks.workload import Workload
from torchrl_grpo.config import ModelConfig
from torchrl_grpo.models import loading
from torchrl_grpo.models.precision import has_fast_bfloat16

# For runs of more than minutes, vLLM's compiled graphs pay on a CPU too; on a GPU they are the default.
_OURS = {"inference_model.enforce_eager": False, "train_model.compile": True}


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line says.

    Attributes:
        base: the workload that parts vary.
        pairs: measured, per comparison.
        warm_up: pairs before, thrown away.
        output: folder of the report.
    """

    base: Workload
    pairs: int
    warm_up: int
    output: Path

    def work(self, **changes: Any) -> Workload:
        """The base with changes."""
        return dataclasses.replace(self.base, **changes)


def _say(text: str) -> None:
    print(text, flush=True)


def _end_to_end(peer: str, response_tokens: int, **settings: Any) -> Callable[[Options], results.Part]:
    def run(options: Options) -> results.Part:
        work = options.work(response_tokens=response_tokens)
        theirs = dataclasses.replace(work, settings=settings)
        ours = dataclasses.replace(work, settings=_OURS)
        found = compare(("ours", ours), (peer, theirs), options.pairs, options.warm_up, _say)
        return results.whole_step(work, theirs, found)

    return run


def _training(peer: str) -> Callable[[Options], results.Part]:
    def run(options: Options) -> results.Part:
        with tempfile.TemporaryDirectory() as folder:
            recorded = Path(folder) / "rollouts.pt"
            os.environ["BENCH_RECORD"] = str(recorded)
            with Worker("ours", options.work()) as worker:
                worker.step()
            del os.environ["BENCH_RECORD"]
            work = options.work(rollouts=str(recorded))
            ours = dataclasses.replace(work, settings=_OURS)
            found = compare(("ours", ours), (peer, work), options.pairs, options.warm_up, _say)
        return results.training_phase(work, found)

    return run


def _collection(options: Options) -> results.Part:
    work = options.work(prompts=16, samples=8, response_tokens=200)
    found = compare(("ours_collect", work), ("torchrl_collect", work), options.pairs, 2, _say)
    return results.collection(work, found)


_SHAPE = {"hidden": 576, "layers": 4, "vocab": 8192, "budget": 4096}
_GROWTH: dict[str, list[int]] = {
    "samples": [4, 8, 16, 32],
    "response_tokens": [32, 64, 128, 256, 512],
    "vocab": [8_192, 16_384, 49_152, 98_304, 150_016],
    "prompts": [4, 8, 16, 32, 64],
}


def _growth(options: Options) -> results.Part:
    rows: dict[str, list[dict[str, Any]]] = {}
    for axis, values in _GROWTH.items():
        rows[axis] = []
        for value in values:
            shape = {**_SHAPE, **({axis: value} if axis in _SHAPE else {})}
            changes = {} if axis in _SHAPE else {axis: value}
            work = options.work(**{"prompts": 4, "response_tokens": 64, **changes}, settings=shape)
            with Worker("growth", work) as worker:
                worker.step()
                steps = [worker.step() for _ in range(2)]
            best = min(steps, key=lambda step: step["train"])
            # Weight, gradient and AdamW's two averages of the head, in float32.
            head = 4 * 4 * shape["vocab"] * shape["hidden"] / 2**30
            rows[axis].append({"value": value, "train": best["train"], "gib": best["phase_gib"] - head})
            _say(f"  {axis} {value}: {best['train']:.2f} s, {rows[axis][-1]['gib']:.2f} GiB")
    return results.growth(rows, options.output)


def _overlap(options: Options) -> results.Part:
    # Rounds of some seconds, as they are: what publishing to several workers costs does not grow with them.
    work = options.work(response_tokens=192)
    steps = 4
    with Worker("overlap", _timed(work, 0, 0.0, steps)) as worker:
        worker.step()
        # Generation is made to take what the trainer takes: there overlapping gains most.
        trainer_s = statistics.median(worker.step()["train"] for _ in range(3)) / steps
    rows = {}
    for count in (1, 2, 4):
        together = _timed(work, 0, trainer_s, steps)
        apart = _timed(work, count, trainer_s, steps)
        _say(f"  {count} workers, {trainer_s:.2f} s to generate a round:")
        rows[count] = compare(("overlap", apart), ("overlap", together), options.pairs, options.warm_up, _say)
    return results.overlap(work, rows)


def _async_memory(options: Options) -> results.Part:
    return results.async_memory(memory.watch(options.work(), 500), options.output)


def _timed(work: Workload, workers: int, generate_s: float, steps: int) -> Workload:
    return dataclasses.replace(work, settings={"workers": workers, "generate_s": generate_s, "steps": steps})


PARTS: dict[str, Callable[[Options], results.Part]] = {
    "collection": _collection,
    "growth": _growth,
    "overlap": _overlap,
    "async-memory": _async_memory,
    "training-trl": _training("trl_grpo"),
    "training-torchrl": _training("torchrl_stock"),
    "trl-64": _end_to_end("trl_grpo", 64),
    "trl-16": _end_to_end("trl_grpo", 16),
    "trl-256": _end_to_end("trl_grpo", 256),
    "trl-64-no-checkpointing": _end_to_end("trl_grpo", 64, gradient_checkpointing=False),
    "torchrl-64": _end_to_end("torchrl_stock", 64),
    "torchrl-64-lean": _end_to_end("torchrl_stock", 64, entropy_bonus=False, prompt_log_probs=False),
    "torchrl-16": _end_to_end("torchrl_stock", 16),
    "torchrl-256": _end_to_end("torchrl_stock", 256),
}
# Its first weight push fails on a CPU with vLLM 0.32.
ON_GPU: dict[str, Callable[[Options], results.Part]] = {
    f"trl-vllm-{length}": _end_to_end("trl_grpo", length, use_vllm=True, vllm_mode="colocate")
    for length in (16, 64, 256)
}


def main() -> None:
    """Run the parts asked for, or all."""
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # The loop around TorchRL's parts is written for a CPU.
    on_gpu = {name: part for name, part in PARTS.items() if "torchrl" not in name and name != "collection"}
    parts = {**on_gpu, **ON_GPU} if here.type == "cuda" else PARTS
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)}; default: all")
    parser.add_argument("--pairs", type=int, default=5, help="measured, per comparison (default: 5)")
    parser.add_argument("--warm-up", type=int, default=1, help="pairs thrown away before (default: 1)")
    parser.add_argument("--model", default="smollm2-135m", help="as model.name of a run")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument(
        "--autocast",
        choices=("auto", "no", "bf16"),
        default="auto",
        help="numbers of both sides; auto: bf16 where the machine computes fast in it (default)",
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="folder of the report")
    words = parser.parse_args()
    if unknown := set(words.parts) - set(parts):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; write some of {', '.join(parts)}")
    automatic = "bf16" if has_fast_bfloat16(here) else "no"
    base = Workload(
        loading.resolve(ModelConfig(name=words.model)),
        words.prompts,
        words.samples,
        autocast=automatic if words.autocast == "auto" else words.autocast,
    )
    words.output.mkdir(parents=True, exist_ok=True)
    options = Options(base, words.pairs, words.warm_up, words.output)
    for name in words.parts or parts:
        _say(f"{name}:")
        part = parts[name](options)
        # Beside what was measured in the machine's own numbers, not in its place.
        key = name if words.autocast == "auto" else f"{name} {words.autocast}"
        results.save(key, part, options.pairs, options.output)
        _say(json.dumps(part.figures))
    _say(f"written: {options.output / results.REPORT}")


if __name__ == "__main__":
    main()
