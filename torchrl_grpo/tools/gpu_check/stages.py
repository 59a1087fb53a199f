"""The stages: what each runs, what it needs, and what must come out."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrl_grpo.config.engines import engines_with
from torchrl_grpo.errors import TrainingStopped
from torchrl_grpo.tools.processes import program

Figures = dict[str, float | str]
# A run of a stage: four rounds, with a reward in which answers always differ, so that weights move.
_RUN = (
    "--config-name=grpo_quickstart",
    "env.num_envs=4",
    "env.repeats=8",
    "train.total_dialog_turns=128",
    "train.checkpoint_frequency=2",
    "eval.num_problems=16",
    "eval.frequency=2",
    "logging.progress=false",
    "reward.weights={brevity: 1.0}",
)
_FLOAT32 = ("inference_model.dtype=float32", "train_model.autocast=no")
_SERVED = (f"inference_model.backend={engines_with(lambda kind: kind.takes_gpu_weights)[0]}",)
_FIRST_GPU = ("train_model.devices=[0]", "inference_model.devices=[0]")
_BFLOAT16 = ("inference_model.dtype=bfloat16", "train_model.autocast=bf16")
# Largest mean difference of log-probabilities between engine and trainer, in nats.
_NATS = {_FLOAT32: 1e-3, _BFLOAT16: 0.5}
# The measured peak of memory may exceed the predicted one by this share, and by this many GiB. What libraries
# take differs between machines.
_MEMORY_SHARE, _MEMORY_GIB = 0.2, 0.5
_CUDA_MEMORY = tuple(f"memory/{phase}_cuda_gib" for phase in ("generate", "prepare", "train"))
_PEAK = re.compile(r"^memory: (\S+) at most ([0-9.]+) of", re.MULTILINE)
_BREVITY = "def brevity(completion, example):\n    return 1 / (1 + len(completion))\n"


@dataclass(frozen=True)
class Context:
    """What a stage runs with.

    Attributes:
        folder: folder of all stages.
        model: folder of the model.
        gpus: number of visible GPUs.
        words: further words of every run.
        limit_s: seconds after which a stage has failed.
    """

    folder: Path
    model: Path
    gpus: int
    words: Sequence[str]
    limit_s: float


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        run: function that runs it and returns its figures.
        shows: what it shows, for ``--list``.
        lacks: function that returns why it cannot run here, or an empty text.
    """

    run: Callable[[Context], Figures]
    shows: str
    lacks: Callable[[Context], str] = lambda context: ""


def kernel(name: str) -> Callable[[Context], Figures]:
    """Return a stage that runs a function of :mod:`~torchrl_grpo.tools.gpu_check.kernels`."""

    def run(context: Context) -> Figures:
        answer = context.folder / f"{name}.json"
        words = ["-m", "torchrl_grpo.tools.gpu_check", "--measure", name, str(context.model), str(answer)]
        _call(context, name, [sys.executable, *words])
        figures: Figures = json.loads(answer.read_text())
        return figures

    return run


def train(
    name: str, *words: str, numbers: tuple[str, str] = _FLOAT32, script: str = "grpo.py"
) -> Callable[[Context], Figures]:
    """Return a stage that trains for four steps.

    Args:
        name: name of its folder.
        words: words of the run.
        numbers: number format, as words.
        script: script of the run.
    """

    def run(context: Context) -> Figures:
        log_text = _train(context, name, (*numbers, *words), script)
        return _figures(context.folder / name, log_text, _NATS[numbers])

    return run


def _train(
    context: Context, name: str, words: Sequence[str], script: str = "grpo.py", folder: str = "hydra.run.dir"
) -> str:
    (context.folder / "brevity.py").write_text(_BREVITY)
    own = f"reward.functions={{brevity: {context.folder}/brevity.py:brevity}}"
    command = [sys.executable, str(program(script)), *_RUN, own, f"model.name={context.model}", *words]
    return _call(context, name, [*command, *context.words, f"{folder}={context.folder / name}"])


def _call(context: Context, name: str, command: Sequence[str]) -> str:
    """Run a command, and return what it printed.

    Raises:
        TrainingStopped: it failed, or took too long.
    """
    log = context.folder / f"{name}.log"
    with log.open("wb") as output:
        # A group of its own, so that ranks and servers end with a stage that takes too long.
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        code = process.wait(context.limit_s)
    except subprocess.TimeoutExpired as error:
        raise TrainingStopped(f"not done after {context.limit_s:g} s; {log} has its output") from error
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    log_text = log.read_text(errors="replace")
    if code:
        last = [text for text in log_text.splitlines() if text.strip()][-1:]
        raise TrainingStopped(f"exit code {code}: {' '.join(last)} ({log})")
    return log_text


def _figures(folder: Path, log_text: str, nats: float) -> Figures:
    """Check a run that has ended, and return its figures."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["step"] > 0]
    summary = json.loads((folder / "summary.json").read_text())
    if summary["steps"] != 4 or not any(line.get("optimizer/grad_norm") for line in trained):
        raise TrainingStopped(f"{summary['steps']} steps and no gradient in {folder}: nothing was learned")
    gap = max(line["publish/logprob_diff_mean"] for line in trained if "publish/logprob_diff_mean" in line)
    if not gap <= nats:
        raise TrainingStopped(f"engine and trainer differ by {gap:.3g} nats on average; {nats:g} is rounding")
    # On a GPU, memory is what all processes have in use there after each phase of a step. Otherwise it is
    # that of the trainer's process.
    on_gpu = [line[name] for line in trained for name in _CUDA_MEMORY if line.get(name)]
    peak = float(max(on_gpu, default=summary["peak_memory_gib"]))
    figures: Figures = {
        "engine_to_trainer_nats": gap,
        "generated_tokens_per_s": _usual(trained, "throughput/generated_tokens_per_s"),
        "trained_tokens_per_s": _usual(trained, "throughput/trained_tokens_per_s"),
        "publish_s": _usual(trained, "time/publish_s"),
        "peak_gib": peak,
    }
    if predicted := _PEAK.findall(log_text):
        figures["predicted_gib"] = max(float(peak) for _, peak in predicted)
        if peak > (1 + _MEMORY_SHARE) * float(figures["predicted_gib"]) + _MEMORY_GIB:
            raise TrainingStopped(f"{peak:.2f} GiB were used, and {figures['predicted_gib']} predicted")
    return figures


def _usual(lines: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return the median of a metric over steps; 0 if it is never more.

    The first step is left out, because it also warms up. Values of 0 are left out, because asynchronous
    workers have nothing left to generate in the last step.
    """
    values = [float(line[name] or 0.0) for line in lines[1:]]
    return statistics.median([value for value in values if value] or [0.0])


def sweep(context: Context) -> Figures:
    """Run two jobs in one process, which shows that the first leaves the memory to the second."""
    words = (*_FLOAT32, "--multirun", "optimizer.lr=1e-5,2e-5")
    log_text = _train(context, "sweep", words, folder="hydra.sweep.dir")
    peaks = [_figures(context.folder / "sweep" / job, log_text, _NATS[_FLOAT32])["peak_gib"] for job in "01"]
    if float(peaks[1]) > float(peaks[0]) + _MEMORY_GIB:
        raise TrainingStopped(f"the second job took {peaks[1]:.2f} GiB, and the first {peaks[0]:.2f}")
    return {"first_peak_gib": peaks[0], "second_peak_gib": peaks[1]}


def resume(context: Context) -> Figures:
    """Kill a run while it writes a checkpoint, and resume it.

    On a CPU the resumed run must equal the uninterrupted one. Kernels of a GPU add in any order, so there it
    must end.
    """
    words = ["--kills", "1", "--folder", str(context.folder / "resume"), f"model.name={context.model}"]
    command = [sys.executable, "-m", "torchrl_grpo.tools.verify_resume", *words, *_FLOAT32, *context.words]
    try:
        log_text = _call(context, "resume", command)
    except TrainingStopped as error:
        log_text = (context.folder / "resume.log").read_text(errors="replace")
        # On a GPU the numbers may differ, but no line may be missing. Whatever else is wrong has another end.
        rounding = "1 kills: the resumed run DIFFERS" in log_text and "different: one has" not in log_text
        if context.gpus == 0 or not rounding:
            raise error
    return {"resumed": "equals" if "the resumed run equals" in log_text else "ends with other rounding"}


def sleep(context: Context) -> Figures:
    """Compare an engine that frees its memory with one that does not."""
    figures: Figures = {}
    for value in ("true", "false"):
        name = f"sleep_{value}"
        log_text = _train(context, name, (*_FLOAT32, f"inference_model.sleep={value}"))
        _figures(context.folder / name, log_text, _NATS[_FLOAT32])
        lines = [json.loads(line) for line in (context.folder / name / "metrics.jsonl").open()]
        figures[f"{name}_step_s"] = float(lines[-2]["time/step_s"])
        # In use while the trainer is about to train.
        figures[f"{name}_gib"] = float(lines[-2]["memory/prepare_cuda_gib"])
    if not float(figures["sleep_true_gib"]) < 0.8 * float(figures["sleep_false_gib"]):
        raise TrainingStopped(
            f"an engine that sleeps leaves {figures['sleep_true_gib']:.2f} GiB in use, and one that stays "
            f"awake {figures['sleep_false_gib']:.2f}"
        )
    return figures


def against_trl(context: Context) -> Figures:
    """Compare a training step with TRL's on the same batch, in pairs."""
    output = context.folder / "trl"
    words = ["-m", "benchmarks", "training-trl", "--pairs", "3" if context.gpus else "1", "--no-compile"]
    words += ["--model", str(context.model), "--prompts", "4", "--samples", "8", "--output", str(output)]
    root = Path(__file__).resolve().parents[3]
    _call(context, "trl", ["env", f"PYTHONPATH={root}", sys.executable, *words])
    (comparison,) = json.loads((output / "results.json").read_text()).values()
    low, middle, high = comparison["figures"]["ratio"]
    return {"times_as_fast": middle, "lowest": low, "highest": high}


def _needs_gpu(context: Context) -> str:
    return "" if context.gpus else "it needs a GPU"


def _needs_gpus(context: Context) -> str:
    return "" if context.gpus > 1 else "it needs two GPUs"


def _needs(package: str, gpu: bool = False) -> Callable[[Context], str]:
    def lacks(context: Context) -> str:
        missing = "" if importlib.util.find_spec(package) else f"the package {package} is not installed"
        return missing or (_needs_gpu(context) if gpu else "")

    return lacks


def _needs_checkout(context: Context) -> str:
    there = (Path(__file__).resolve().parents[3] / "benchmarks").is_dir()
    return _needs("trl")(context) if there else "it needs a checkout of the project"


# In the order in which they run: the first ones show whether the others can work.
STAGES: dict[str, Stage] = {
    "environment": Stage(kernel("environment"), "versions, devices and the speed of matrix products"),
    "scores": Stage(
        kernel("scores"), "log-probabilities and gradients against the CPU, prompts shared or not"
    ),
    "step": Stage(
        kernel("step"),
        "a micro-batch that never waits for the GPU, exact products of the head, noise, parked moments",
        _needs_gpu,
    ),
    "float32": Stage(
        train("float32"), "training with vLLM in float32; weights proved after each publication"
    ),
    "bfloat16": Stage(
        train("bfloat16", "optimizer.lr=1e-4", "policy.kl_coef=0.01", numbers=_BFLOAT16),
        "the same in bfloat16, with a reference model",
    ),
    "compiled": Stage(
        train(
            "compiled", "inference_model.enforce_eager=false", "train_model.compile=true", numbers=_BFLOAT16
        ),
        "compiled layers, and vLLM's compiled graphs",
    ),
    "sleep": Stage(sleep, "an engine that frees its memory while the trainer trains", _needs_gpu),
    "lora": Stage(
        train("lora", "train_model.lora.rank=8", "optimizer.lr=1e-3", numbers=_BFLOAT16),
        "adapters, merged for the engine",
    ),
    "qlora": Stage(
        train(
            "qlora",
            "train_model.lora.rank=8",
            "train_model.quantization=nf4",
            "optimizer.lr=1e-3",
            numbers=_BFLOAT16,
        ),
        "adapters on a model in 4 bits",
        _needs("bitsandbytes", gpu=True),
    ),
    "flash": Stage(kernel("flash"), "attention over shared prompts without masks, and its speed", _needs_gpu),
    "flash_attn": Stage(
        train(
            "flash_attn",
            "train_model.shared_prefix=false",
            "train_model.attn_implementation=flash_attention_2",
            numbers=_BFLOAT16,
        ),
        "the attention kernels of the package flash-attn",
        _needs("flash_attn", gpu=True),
    ),
    "sweep": Stage(sweep, "two jobs in one process"),
    "resume": Stage(resume, "a run that is killed while it writes a checkpoint, and resumed"),
    "servers": Stage(train("servers", *_SERVED), "an engine in a vLLM server, over HTTP"),
    "ipc": Stage(
        train("ipc", *_SERVED, "inference_model.weight_transfer=cuda_ipc", *_FIRST_GPU),
        "weights that a server reads where they lie, on the trainer's GPU",
        _needs_gpu,
    ),
    "ipc_peer": Stage(
        train("ipc_peer", *_SERVED, "inference_model.weight_transfer=cuda_ipc"),
        "the same from another GPU, which reads the memory of the trainer's",
        _needs_gpus,
    ),
    "ipc_ray": Stage(
        train(
            "ipc_ray",
            "collector.max_policy_age=1",
            "inference_model.weight_transfer=cuda_ipc",
            script="grpo-async.py",
        ),
        "the same from a worker on Ray, on another GPU if there is one",
        _needs_gpu,
    ),
    "nccl": Stage(
        train("nccl", *_SERVED, "inference_model.weight_transfer=nccl"),
        "weights that go to the GPU of a server by NCCL; on a CPU by gloo",
        lambda context: _needs_gpus(context) if context.gpus else "",
    ),
    "tensor_parallel": Stage(
        train(
            "tensor_parallel",
            *_SERVED,
            "inference_model.tensor_parallel_size=2",
            "train_model.devices=[0]",
            "inference_model.devices=[0,1]",
        ),
        "a server of two GPUs, one of which is the trainer's",
        _needs_gpus,
    ),
    "async": Stage(
        train("async", "collector.max_policy_age=1", script="grpo-async.py"),
        "collection and optimization at the same time, on Ray",
        lambda context: _needs_gpus(context) if context.gpus else "",
    ),
    "ranks": Stage(
        train("ranks", "train_model.num_devices=2", "train_model.parallelism=fsdp2"),
        "two training ranks with FSDP2",
        lambda context: _needs_gpus(context) if context.gpus else "",
    ),
    "trl": Stage(against_trl, "a training step against TRL", _needs_checkout),
}
