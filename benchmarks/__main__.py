"""``python -m benchmarks``: run the comparisons and write ``benchmarks/RESULTS.md``.

Each part is measured in one run that alternates between its two sides. The result is a ratio, because
machines differ and are shared. The section of a part stays in the report until the part is measured again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import memory, results
from benchmarks.pairs import Comparison, compare
from benchmarks.protocol import Worker
from benchmarks.workload import Workload
from torchrl_grpo.config.schema import ModelConfig
from torchrl_grpo.models import loading
from torchrl_grpo.models.precision import has_fast_bfloat16

# Compiled graphs pay off on a CPU in runs longer than minutes; on a GPU they are vLLM's default. A machine
# with memory for both sides has enough for larger micro-batches (docs/speed.md lists their memory).
_OURS = {
    "inference_model.enforce_eager": False,
    "train_model.compile": True,
    "train.max_tokens_per_microbatch": 8192,
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line.

    Attributes:
        base: workload that the parts vary.
        pairs: number of measured pairs per comparison.
        warm_up: number of warm-up pairs, which are discarded.
        plot: file of the part's plot, if it has one.
        ours: settings of this project.
    """

    base: Workload
    pairs: int
    warm_up: int
    plot: Path
    ours: dict[str, Any]

    def work(self, **changes: Any) -> Workload:
        """Return the base workload with changes."""
        return dataclasses.replace(self.base, **changes)

    def compare(self, ours: tuple[str, Workload], theirs: tuple[str, Workload]) -> Iterator[Comparison]:
        """See :func:`benchmarks.pairs.compare`."""
        return compare(ours, theirs, self.pairs, self.warm_up, _say)


# A part yields its result after every pair, so that an interrupt or a failure loses only the last pair.
Run = Callable[[Options], Iterator[results.Part]]


def _say(text: str) -> None:
    print(text, flush=True)


def _end_to_end(peer: str, response_tokens: int, **settings: Any) -> Run:
    def run(options: Options) -> Iterator[results.Part]:
        theirs = options.work(response_tokens=response_tokens, settings=settings)
        ours = dataclasses.replace(theirs, settings=options.ours)
        for comparison in options.compare(("ours", ours), (peer, theirs)):
            yield results.whole_step(ours, theirs, comparison, options.pairs)

    return run


def _training(peer: str, **settings: Any) -> Run:
    def run(options: Options) -> Iterator[results.Part]:
        with tempfile.TemporaryDirectory() as folder:
            recorded = Path(folder) / "rollouts.pt"
            os.environ["BENCH_RECORD"] = str(recorded)
            # Responses are only recorded here, so the engine that starts fastest will do.
            with Worker("ours", options.work(settings={"inference_model.backend": "transformers"})) as worker:
                worker.step()
            del os.environ["BENCH_RECORD"]
            theirs = options.work(rollouts=str(recorded), settings=settings)
            ours = dataclasses.replace(theirs, settings=options.ours)
            for comparison in options.compare(("ours", ours), (peer, theirs)):
                yield results.training_phase(ours, theirs, comparison, options.pairs)

    return run


def _collection(options: Options) -> Iterator[results.Part]:
    work = options.work(prompts=16, samples=8, response_tokens=200)
    for comparison in options.compare(("ours_collect", work), ("torchrl_collect", work)):
        yield results.collection(work, comparison, options.pairs)


_SHAPE = {"hidden": 576, "layers": 4, "vocab": 8192, "budget": 4096}
_GROWTH: dict[str, list[int]] = {
    "vocab": [8_192, 16_384, 49_152, 98_304, 150_016],
    "samples": [4, 8, 16, 32],
    "response_tokens": [32, 64, 128, 256, 512],
    "prompts": [4, 8, 16, 32, 64],
}


def _growth(options: Options) -> Iterator[results.Part]:
    planned = sum(map(len, _GROWTH.values()))
    rows: dict[str, list[dict[str, Any]]] = {}
    for axis, values in _GROWTH.items():
        for value in values:
            shape = {**_SHAPE, **({axis: value} if axis in _SHAPE else {})}
            changes = {} if axis in _SHAPE else {axis: value}
            work = options.work(**{"prompts": 4, "response_tokens": 64, **changes}, settings=shape)
            with Worker("growth", work) as worker:
                worker.step()
                steps = [worker.step() for _ in range(2)]
            best = min(steps, key=lambda step: step["train"])
            # Subtract the head's weight, gradient and two AdamW averages, in float32.
            head = 4 * 4 * shape["vocab"] * shape["hidden"] / 2**30
            row = {"value": value, "train": best["train"], "gib": best["phase_gib"] - head}
            rows.setdefault(axis, []).append(row)
            _say(f"  {axis} {value}: {row['train']:.2f} s, {row['gib']:.2f} GiB")
            yield results.growth(rows, planned, options.plot)


def _overlap(options: Options) -> Iterator[results.Part]:
    # Rounds take some seconds, as in real runs. The cost of publishing to workers does not grow with them.
    work = options.work(response_tokens=192)
    steps = 4
    with Worker("overlap", _timed(work, 0, 0.0, steps)) as worker:
        worker.step()
        # Generation takes as long as training, because overlap gains most in this case.
        trainer_s = statistics.median(worker.step()["train"] for _ in range(3)) / steps
    rows: dict[int, Comparison] = {}
    for count in (1, 2, 4):
        sync = _timed(work, 0, trainer_s, steps)
        asynchronous = _timed(work, count, trainer_s, steps)
        _say(f"  {count} workers, {trainer_s:.2f} s to generate a round:")
        for comparison in options.compare(("overlap", asynchronous), ("overlap", sync)):
            rows[count] = comparison
            yield results.overlap(work, rows, options.pairs)


def _async_memory(options: Options) -> Iterator[results.Part]:
    yield results.async_memory(memory.watch(options.work(), 500), options.plot)


def _timed(work: Workload, workers: int, generate_s: float, steps: int) -> Workload:
    return dataclasses.replace(work, settings={"workers": workers, "generate_s": generate_s, "steps": steps})


PARTS: dict[str, Run] = {
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
    "torchrl-64-float32": _end_to_end("torchrl_stock", 64, autocast="no"),
    "torchrl-16": _end_to_end("torchrl_stock", 16),
    "torchrl-256": _end_to_end("torchrl_stock", 256),
}
_COLOCATED = {"use_vllm": True, "vllm_mode": "colocate"}
# TRL's options if memory is no concern.
_LARGE = {"gradient_checkpointing": False, "per_device_train_batch_size": 64}
# Parts for a GPU only: TRL's first weight update fails on a CPU with vLLM 0.32.
ON_GPU: dict[str, Run] = {
    **{f"trl-vllm-{length}": _end_to_end("trl_grpo", length, **_COLOCATED) for length in (16, 64, 256)},
    "trl-vllm-64-large": _end_to_end("trl_grpo", 64, **_COLOCATED, **_LARGE),
    "training-trl-large": _training("trl_grpo", **_LARGE),
}


def main() -> None:
    """Run the given parts, or all."""
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # The training loop around TorchRL's parts supports a CPU only.
    on_gpu = {name: part for name, part in PARTS.items() if "torchrl" not in name and name != "collection"}
    parts = {**on_gpu, **ON_GPU} if here.type == "cuda" else PARTS
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"one of {', '.join(parts)} (default: all)")
    parser.add_argument("--pairs", type=int, default=5, help="measured pairs per comparison (default: 5)")
    parser.add_argument("--warm-up", type=int, default=1, help="discarded pairs before them (default: 1)")
    parser.add_argument("--model", default="smollm2-135m", help="model, as model.name of a run")
    parser.add_argument("--prompts", type=int, default=8, help="prompts per step (default: 8)")
    parser.add_argument("--samples", type=int, default=8, help="responses per prompt (default: 8)")
    parser.add_argument(
        "--autocast",
        choices=("auto", "no", "bf16"),
        default="auto",
        help="number format of both sides; auto: bf16 if the machine is fast in it (default)",
    )
    parser.add_argument(
        "--no-compile",
        action="store_true",
        help="leave this project uncompiled: it starts minutes earlier, and is slower",
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="folder of the report")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(parts):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; write some of {', '.join(parts)}")
    automatic = "bf16" if has_fast_bfloat16(here) else "no"
    autocast = automatic if args.autocast == "auto" else args.autocast
    chosen = args.parts or list(parts)
    if autocast == "no" and (refused := [name for name in chosen if "vllm" in name]):
        parser.error(
            f"--autocast no with {', '.join(refused)}: TRL's vLLM uses the model's own number format, so the "
            "two sides would generate in different formats; leave out --autocast no or these parts"
        )
    base = Workload(
        loading.resolve(ModelConfig(name=args.model)), args.prompts, args.samples, autocast=autocast
    )
    args.output.mkdir(parents=True, exist_ok=True)
    # A run with other options than the defaults has its own sections and does not replace the others.
    args.model = Path(args.model).name
    sizes = ("model", "prompts", "samples", "autocast")
    unusual = [
        f"{size}={getattr(args, size)}" for size in sizes if getattr(args, size) != parser.get_default(size)
    ]
    ours = dict(_OURS)
    if here.type == "cuda":
        # A step of 64 responses of 256 tokens in one pass. Both sides share the GPU, so it has a bound.
        ours["train.max_tokens_per_microbatch"] = 32768
    if args.no_compile:
        unusual.append("no-compile")
        ours |= {"inference_model.enforce_eager": True, "train_model.compile": False}
    machine = results.machine()
    failed = {}
    for name in chosen:
        _say(f"{name}:")
        key = "-".join([name, *(["gpu"] if here.type == "cuda" else []), *unusual])
        plot = args.output / f"{key}.svg"
        try:
            for part in parts[name](Options(base, args.pairs, args.warm_up, plot, ours)):
                results.save(key, part, machine, args.output)
        except (RuntimeError, SystemExit) as error:
            # Go on with the other parts, which take hours. The report has this part's results so far.
            failed[name] = error
            _say(f"{name} failed: {error}")
            continue
        _say(json.dumps(part.figures))
    _say(f"written: {args.output / results.REPORT}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; the error of each is above")


if __name__ == "__main__":
    main()
