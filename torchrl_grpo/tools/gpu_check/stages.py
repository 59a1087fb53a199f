"""The stages: what each runs, what it needs, and what must come out."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torchrl_grpo.config.engines import engines_with
from torchrl_grpo.errors import TrainingStopped
from torchrl_grpo.tools.gpu_check import runs
from torchrl_grpo.tools.gpu_check.runs import BFLOAT16, FLOAT32, NATS, Context, Figures
from torchrl_grpo.tools.gpu_check.shaped import generation, needs_machine, recipe, speed

_SERVED = (f"inference_model.backend={engines_with(lambda kind: kind.takes_gpu_weights)[0]}",)
_FIRST_GPU = ("train_model.devices=[0]", "inference_model.devices=[0]")
# As recipes run engines on a GPU: captured graphs, which hold the addresses of the weights.
_GRAPHS = "inference_model.enforce_eager=false"


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        run: function that runs it and returns its figures.
        shows: what it shows, for ``--help``.
        lacks: function that returns why it cannot run here, or an empty text.
        takes_s: seconds that it takes on a GPU, estimated from starts of vLLM on an H100 (70 s with captured
            graphs); with fewer left, ``--seconds`` skips it.
        uses_model: whether it uses the model of all stages.
    """

    run: Callable[[Context], Figures]
    shows: str
    lacks: Callable[[Context], str] = lambda context: ""
    takes_s: float = 60.0
    uses_model: bool = True


def kernel(name: str) -> Callable[[Context], Figures]:
    """Return a stage that runs a function of :mod:`~torchrl_grpo.tools.gpu_check.kernels`."""
    return lambda context: runs.measure(context, name, context.model)


def train(
    name: str, *words: str, numbers: tuple[str, str] | None = FLOAT32, script: str = "grpo.py"
) -> Callable[[Context], Figures]:
    """Return a stage that trains for four steps.

    Args:
        name: name of its folder.
        words: words of the run.
        numbers: number format, as words. None takes bfloat16 and captured graphs on a GPU, as recipes do, and
            float32 on a CPU.
        script: script of the run.
    """

    def run(context: Context) -> Figures:
        own = numbers or (BFLOAT16 if context.gpus else FLOAT32)
        graphs = (_GRAPHS,) if numbers is None and context.gpus else ()
        runs.train(context, name, (*runs.SHORT_RUN, *own, *graphs, *words), script)
        return runs.check(context.folder / name, NATS[own], asynchronous=script != "grpo.py")

    return run


def sweep(context: Context) -> Figures:
    """Run two jobs in one process, which shows that the first leaves the memory to the second."""
    numbers = BFLOAT16 if context.gpus else FLOAT32
    on_gpu = (_GRAPHS, "inference_model.sleep=true") if context.gpus else ()
    words = (*runs.SHORT_RUN, *numbers, *on_gpu, "--multirun", "optimizer.lr=1e-5,2e-5")
    runs.train(context, "sweep", words, folder="hydra.sweep.dir")
    jobs = [runs.check(context.folder / "sweep" / job, NATS[numbers]) for job in "01"]
    phase = "optimize_gib" if context.gpus else "peak_gib"
    peaks = [float(figures[phase]) for figures in jobs]
    if not peaks[1] <= peaks[0] + runs.MEMORY_GIB:
        raise TrainingStopped(f"the second job took {peaks[1]:.2f} GiB, and the first {peaks[0]:.2f}")
    return {"first_peak_gib": peaks[0], "second_peak_gib": peaks[1]}


def resume(context: Context) -> Figures:
    """Kill a run while it writes a checkpoint, and resume it.

    On a CPU the resumed run must equal the uninterrupted one. Kernels of a GPU add in any order, so there it
    must end.
    """
    words = ["--kills", "1", "--folder", str(context.folder / "resume"), f"model.name={context.model}"]
    words += [*FLOAT32, *runs.task_words(context), *context.words]
    try:
        log_text = runs.call(
            context, "resume", [sys.executable, "-m", "torchrl_grpo.tools.verify_resume", *words]
        )
    except TrainingStopped as error:
        log_text = (context.folder / "resume.log").read_text(errors="replace")
        # On a GPU the numbers may differ, but no line may be missing. Whatever else is wrong has another end.
        rounding = "1 kills: the resumed run DIFFERS" in log_text and "different: one has" not in log_text
        if context.gpus == 0 or not rounding:
            raise error
    return {"resumed": "equals" if "the resumed run equals" in log_text else "ends with other rounding"}


def sleep(context: Context) -> Figures:
    """Compare an engine that frees its memory with one that does not, both with captured graphs."""
    figures: Figures = {}
    for value in ("true", "false"):
        name = f"sleep_{value}"
        words = (*runs.SHORT_RUN, *BFLOAT16, _GRAPHS, f"inference_model.sleep={value}")
        runs.train(context, name, words)
        runs.check(context.folder / name, NATS[BFLOAT16])
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
    runs.call(context, "trl", ["env", f"PYTHONPATH={root}", sys.executable, *words])
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
    "environment": Stage(
        kernel("environment"),
        "versions, devices and the speed of matrix products",
        takes_s=20,
        uses_model=False,
    ),
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
        train("bfloat16", "optimizer.lr=1e-4", "policy.kl_coef=0.01", numbers=BFLOAT16),
        "the same in bfloat16, with a reference model",
    ),
    "compiled": Stage(
        train("compiled", _GRAPHS, "train_model.compile=true", numbers=BFLOAT16),
        "compiled layers, and vLLM's compiled graphs",
        takes_s=150,
    ),
    "sleep": Stage(
        sleep,
        "an engine with captured graphs that frees its memory while the trainer trains",
        _needs_gpu,
        200,
    ),
    "lora": Stage(
        train("lora", "train_model.lora.rank=8", "optimizer.lr=1e-3", numbers=BFLOAT16),
        "adapters, merged for the engine",
    ),
    "qlora": Stage(
        train(
            "qlora",
            "train_model.lora.rank=8",
            "train_model.quantization=nf4",
            "optimizer.lr=1e-3",
            numbers=BFLOAT16,
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
            numbers=BFLOAT16,
        ),
        "the attention kernels of the package flash-attn",
        _needs("flash_attn", gpu=True),
    ),
    "sweep": Stage(sweep, "two jobs in one process, as recipes run them", takes_s=200),
    "resume": Stage(resume, "a run that is killed while it writes a checkpoint, and resumed", takes_s=240),
    "servers": Stage(train("servers", *_SERVED, numbers=None), "an engine in a vLLM server, over HTTP"),
    "ipc": Stage(
        train("ipc", *_SERVED, "inference_model.weight_transfer=cuda_ipc", *_FIRST_GPU, numbers=None),
        "weights that a server reads where they lie, on the trainer's GPU",
        _needs_gpu,
    ),
    "ipc_peer": Stage(
        train("ipc_peer", *_SERVED, "inference_model.weight_transfer=cuda_ipc", numbers=None),
        "the same from another GPU, which reads the memory of the trainer's",
        _needs_gpus,
    ),
    "ipc_ray": Stage(
        train(
            "ipc_ray",
            "collector.max_policy_age=1",
            "inference_model.weight_transfer=cuda_ipc",
            numbers=None,
            script="grpo-async.py",
        ),
        "the same from a worker on Ray, on another GPU if there is one",
        _needs_gpu,
    ),
    "nccl": Stage(
        train("nccl", *_SERVED, "inference_model.weight_transfer=nccl", numbers=None),
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
            _GRAPHS,
            numbers=BFLOAT16,
        ),
        "a server of two GPUs, one of which is the trainer's",
        _needs_gpus,
    ),
    "async": Stage(
        train("async", "collector.max_policy_age=1", numbers=None, script="grpo-async.py"),
        "collection and optimization at the same time, on Ray",
        lambda context: _needs_gpus(context) if context.gpus else "",
    ),
    "ranks": Stage(
        train("ranks", "train_model.num_devices=2", "train_model.parallelism=fsdp2", numbers=BFLOAT16),
        "two training ranks with FSDP2, which gather shards of float32 in bfloat16",
        lambda context: _needs_gpus(context) if context.gpus else "",
    ),
    "speed": Stage(
        speed, "optimizer steps of several sizes: seconds, FLOP/s, kernels, memory by phase", uses_model=False
    ),
    "generation": Stage(
        generation,
        "an engine: seconds of a token, of new weights, of sleep; speeds of links",
        takes_s=90,
        uses_model=False,
    ),
    **{
        f"recipe_{name}": Stage(
            recipe(name),
            f"20 short steps of +recipe={name} on a random model of its shape",
            needs_machine(name),
            240,
            uses_model=False,
        )
        for name in ("cpu", "gpu_24gb", "gpu_80gb", "gpu_8x80gb")
    },
    "recipe_gpu_8x80gb_async": Stage(
        recipe("gpu_8x80gb", asynchronous=True),
        "the same with grpo-async.py",
        # On a CPU the stage "async" shows as much.
        lambda context: _needs_gpu(context) or needs_machine("gpu_8x80gb")(context),
        240,
        uses_model=False,
    ),
    "trl": Stage(against_trl, "a training step against TRL", _needs_checkout),
}
