"""Starts the commands of a stage, and checks the runs that they leave behind."""

from __future__ import annotations

import contextlib
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from torchrl_grpo.errors import TrainingStopped
from torchrl_grpo.tools.processes import family, program

Figures = dict[str, float | str]
# A run of a stage: four rounds, with a reward in which answers always differ, so that weights move.
SHORT_RUN = (
    "--config-name=grpo_quickstart",
    "env.num_envs=4",
    "env.repeats=8",
    "train.total_dialog_turns=128",
    "train.checkpoint_frequency=2",
    "eval.num_problems=16",
    "eval.frequency=2",
)
SHORT_RUN_STEPS = 4
FLOAT32 = ("inference_model.dtype=float32", "train_model.autocast=no")
BFLOAT16 = ("inference_model.dtype=bfloat16", "train_model.autocast=bf16")
# Largest mean difference of log-probabilities between engine and trainer, in nats.
NATS = {FLOAT32: 1e-3, BFLOAT16: 0.5}
# The measured peak of memory may exceed the predicted one by this share, and by this many GiB. What libraries
# take differs between machines.
MEMORY_SHARE, MEMORY_GIB = 0.2, 0.5
# Phase of the prediction -> metric of the memory that all processes use on the trainer's GPU after it.
_CUDA_MEMORY = {
    "generate": "memory/generate_cuda_gib",
    "prepare": "memory/prepare_cuda_gib",
    "optimize": "memory/train_cuda_gib",
}
_MISSING_PACKAGE = re.compile(r"No module named '([^'.]+)")
_BREVITY = "def brevity(completion, example):\n    return 1 / (1 + len(completion))\n"


class OutOfTime(TrainingStopped):
    """A command took longer than its stage may."""


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


def task_words(context: Context) -> list[str]:
    """Return the words for sums from a file, with a reward that needs no package. Both are written here."""
    reward, sums = context.folder / "brevity.py", context.folder / "sums.jsonl"
    reward.write_text(_BREVITY)
    rows = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(20) for b in range(20)]
    sums.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "env=jsonl",
        f"env.data_path={sums}",
        f"reward.functions={{brevity: {reward}:brevity}}",
        "reward.weights={brevity: 1.0}",
        "logging.progress=false",
    ]


def train(
    context: Context,
    name: str,
    words: Sequence[str],
    script: str = "grpo.py",
    folder: str = "hydra.run.dir",
    model: Path | None = None,
) -> None:
    """Run a training command to its end.

    Args:
        context: what the stage runs with.
        name: name of the run's folder.
        words: words of the run.
        script: script of the run.
        folder: key of the folder.
        model: folder of the model; None for that of all stages.

    Raises:
        TrainingStopped: it failed, or took too long.
    """
    command = [sys.executable, str(program(script)), *words, *task_words(context)]
    command += [f"model.name={model or context.model}", *context.words, f"{folder}={context.folder / name}"]
    call(context, name, command)


def measure(context: Context, function: str, model: Path) -> Figures:
    """Run one of the measurements of this package in a process of its own, and return its figures.

    Raises:
        TrainingStopped: it failed, or took too long.
    """
    name = f"{function}_{model.name}"
    answer = context.folder / f"{name}.json"
    words = ["-m", "torchrl_grpo.tools.gpu_check", "--measure", function, str(model), str(answer)]
    call(context, name, [sys.executable, *words])
    figures: Figures = json.loads(answer.read_text())
    return figures


def call(context: Context, name: str, command: Sequence[str]) -> str:
    """Run a command, and return what it printed.

    Raises:
        OutOfTime: it took too long.
        TrainingStopped: it failed. The message names the package if one is missing.
    """
    log = context.folder / f"{name}.log"
    with log.open("wb") as output:
        # A group of its own, so that an interrupt of this program ends it below.
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        code = process.wait(context.limit_s)
    except subprocess.TimeoutExpired as error:
        raise OutOfTime(f"not done after {context.limit_s:g} s; {log} has its output") from error
    finally:
        if process.poll() is None:
            # Ranks, Ray and servers have groups of their own, and would keep their memory in later stages.
            members = family(process.pid)
            process.kill()
            for member in members:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            process.wait()
    log_text = log.read_text(errors="replace")
    if code:
        last = next((text for text in reversed(log_text.splitlines()) if text.strip()), "")
        if package := _MISSING_PACKAGE.search(last):
            raise TrainingStopped(
                f"the package of {package[1]} is not installed; `make setup-dev` installs it ({log})"
            )
        raise TrainingStopped(f"exit code {code}: {last} ({log})")
    return log_text


def check(folder: Path, nats: float, steps: int = SHORT_RUN_STEPS, asynchronous: bool = False) -> Figures:
    """Check a run that has ended, and return its figures.

    Args:
        folder: folder of the run.
        nats: largest mean difference of log-probabilities between engine and trainer.
        steps: number of optimizer steps that the run has.
        asynchronous: whether the script was grpo-async.py.

    Raises:
        TrainingStopped: the run learned nothing, engine and trainer differ, trained weights were not saved in
            float32, or a phase took more memory than predicted.
    """
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["step"] > 0]
    summary = json.loads((folder / "summary.json").read_text())
    if summary["steps"] != steps or not any(line.get("optimizer/grad_norm") for line in trained):
        raise TrainingStopped(f"{summary['steps']} steps and no gradient in {folder}: nothing was learned")
    gap = max(line["publish/logprob_diff_mean"] for line in trained if "publish/logprob_diff_mean" in line)
    if not gap <= nats:
        raise TrainingStopped(f"engine and trainer differ by {gap:.3g} nats on average; {nats:g} is rounding")
    check_formats(folder)
    figures: Figures = {
        "engine_to_trainer_nats": gap,
        "generated_tokens_per_s": _usual(trained, "throughput/generated_tokens_per_s"),
        "trained_tokens_per_s": _usual(trained, "throughput/trained_tokens_per_s"),
        "publish_s": _usual(trained, "time/publish_s"),
    }
    # On a GPU, memory is what all processes have in use there after each phase of a step. Otherwise it is
    # that of the trainer's process.
    measured = {
        phase: max(line[name] for line in trained if line.get(name))
        for phase, name in _CUDA_MEMORY.items()
        if any(line.get(name) for line in trained)
    } or {"peak": summary["peak_memory_gib"]}
    return figures | compare_memory(measured, predicted_gib(folder, asynchronous), MEMORY_SHARE, MEMORY_GIB)


def compare_memory(
    measured: Mapping[str, float], predicted: Mapping[str, float], share: float, gib: float
) -> Figures:
    """Compare memory in GiB with its prediction, phase by phase.

    Args:
        measured: measured memory by phase.
        predicted: predicted memory by phase; phases that it lacks are not compared.
        share: share of the prediction by which it may be exceeded.
        gib: GiB by which it may be exceeded besides.

    Returns:
        ``<phase>_gib`` and ``<phase>_predicted_gib``.

    Raises:
        TrainingStopped: a phase took more.
    """
    figures: Figures = {}
    for phase, used in measured.items():
        figures[f"{phase}_gib"] = used
        if phase in predicted:
            figures[f"{phase}_predicted_gib"] = predicted[phase]
            if not used <= (1 + share) * predicted[phase] + gib:
                raise TrainingStopped(
                    f"memory, {phase}: {used:.2f} GiB were used, and {predicted[phase]:.2f} predicted"
                )
    return figures


def predicted_gib(folder: Path, asynchronous: bool) -> dict[str, float]:
    """Predict the memory of a run on the trainer's first device, in GiB, by phase and at its ``peak``.

    Nothing is predicted for a model of unknown shape.

    Args:
        folder: folder of the run, with its configuration.
        asynchronous: whether the script was grpo-async.py.
    """
    from omegaconf import DictConfig, OmegaConf

    from torchrl_grpo.config import parse
    from torchrl_grpo.planning import preflight, resolve
    from torchrl_grpo.planning.prediction import GIB, PHASES
    from torchrl_grpo.runtime import hardware

    node = OmegaConf.load(folder / ".hydra" / "config.yaml")
    assert isinstance(node, DictConfig)
    cfg = preflight.resolve_proximal(resolve.with_model(resolve.resolved(parse(node))), asynchronous)
    planned = preflight.make(cfg, asynchronous, hardware.present())
    if planned.prediction is None:
        return {}
    device = planned.plan.train_device
    needs = {phase: planned.prediction.need(device, phase) / GIB for phase in PHASES}
    peak = max(needs.values())
    if not planned.plan.sleeps:
        # PyTorch keeps what a phase has freed until an engine wakes. So each phase finds that of the others.
        needs = dict.fromkeys(needs, peak)
    return {**needs, "peak": peak}


def check_formats(folder: Path) -> None:
    """Check that the weights of the newest checkpoint are float32, whatever training computed in.

    Raises:
        TrainingStopped: a tensor is not. Updates would be lost to rounding.
    """
    from safetensors import safe_open

    newest = max((folder / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    for path in sorted((newest / "model").glob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            for name in file.keys():  # noqa: SIM118  it is no mapping
                if (dtype := file.get_slice(name).get_dtype()) != "F32":
                    raise TrainingStopped(f"{name} was trained in {dtype}, and F32 is right ({path})")


def _usual(lines: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return the median of a metric over steps; 0 if it is never more.

    The first step is left out, because it also warms up. Values of 0 are left out, because asynchronous
    workers have nothing left to generate in the last step.
    """
    values = [float(line[name] or 0.0) for line in lines[1:]]
    return statistics.median([value for value in values if value] or [0.0])
