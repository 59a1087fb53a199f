"""Stages on models of known shapes with random weights: speed, and the recipes as they stand."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir

from torchrl_grpo.config import parse
from torchrl_grpo.config.engines import reference_engine
from torchrl_grpo.config.parsing import register_schema
from torchrl_grpo.planning import preflight, resolve
from torchrl_grpo.runtime import hardware
from torchrl_grpo.runtime.config_dir import config_dir
from torchrl_grpo.tools.gpu_check import runs
from torchrl_grpo.tools.gpu_check.runs import BFLOAT16, NATS, Context, Figures

TINY = "tiny"
_SPEED_SHAPES = ("Qwen2.5-0.5B-Instruct", "Qwen2.5-1.5B-Instruct", "Qwen2.5-7B-Instruct")
_STEPS = 20
# Rounds of a recipe's run: with fewer prompts and shorter responses than the recipe's, so that a round takes
# seconds, and yet with enough tokens for several micro-batches. The plan has the recipe's longest texts.
_ON_GPU = ("env.num_envs=8", "env.repeats=8", "inference_model.max_new_tokens=256")
_ON_CPU = (
    "env.num_envs=2",
    "env.repeats=4",
    "inference_model.max_new_tokens=8",
    "inference_model.max_model_len=128",
    # A stage of its own compiles, which takes a CPU a minute.
    "train_model.compile=false",
    f"inference_model.backend={reference_engine()}",
)
# A GPU of 24 or 80 GB has a little less.
_USABLE = 0.9
_GPUS = re.compile(r"gpu_(?:(\d+)x)?(\d+)gb")


def make_model(context: Context, shape: str) -> Path:
    """Return a folder with a random model of a shape, which is written if it is not there yet."""
    folder = context.folder / "models" / shape
    if not (folder / "config.json").exists():
        runs.measure(context, "model", folder)
    return folder


def speed(context: Context) -> Figures:
    """Measure optimizer steps of several shapes, each in a process of its own."""
    figures: Figures = {}
    for shape in _SPEED_SHAPES if context.gpus else (TINY,):
        label = shape.removeprefix("Qwen2.5-").removesuffix("-Instruct")
        for name, figure in runs.measure(context, "speed", make_model(context, shape)).items():
            figures[f"{label}_{name}"] = figure
    return figures


def generation(context: Context) -> Figures:
    """Measure an engine on the smallest of the shapes."""
    return runs.measure(
        context, "generation", make_model(context, _SPEED_SHAPES[0] if context.gpus else TINY)
    )


def recipe(name: str, asynchronous: bool = False) -> Callable[[Context], Figures]:
    """Return a stage that trains with a recipe for 20 steps, on a random model of its shape.

    Args:
        name: name of the recipe.
        asynchronous: whether it collects rounds while it trains.
    """
    script = "grpo-async.py" if asynchronous else "grpo.py"

    def run(context: Context) -> Figures:
        label = f"recipe_{name}{'_async' if asynchronous else ''}"
        settings = yaml.safe_load((config_dir() / "recipe" / f"{name}.yaml").read_text())
        shape = settings["model"]["name"].rpartition("/")[2] if context.gpus else TINY
        samples = 64 if context.gpus else 8
        words = ["--config-name=grpo_gsm8k", f"+recipe={name}", *(_ON_GPU if context.gpus else _ON_CPU)]
        words += [f"train.total_dialog_turns={_STEPS * samples}", "train.checkpoint_frequency=10"]
        words += ["eval.num_problems=4", "eval.frequency=10"]
        model = make_model(context, shape)
        words += _sharing(name, model, asynchronous) if context.gpus else []
        runs.train(context, label, words, script, model=model)
        return runs.check(context.folder / label, NATS[BFLOAT16], _STEPS, asynchronous)

    return run


def _sharing(name: str, model: Path, asynchronous: bool) -> list[str]:
    """Return the words by which engines share GPUs as in the recipe, not as in a shorter run.

    A GPU of more memory than those that the recipe is for shares it as they would.
    """
    register_schema()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        node = compose("grpo_gsm8k", [f"+recipe={name}", f"model.name={model}"])
    cfg = preflight.resolve_proximal(resolve.with_model(resolve.resolved(parse(node))), asynchronous)
    present, size = hardware.present(), _GPUS.fullmatch(name)
    if size is not None:
        most = hardware.Gpu(gib=float(size[2])).usable_gib
        assert most is not None
        gpus = tuple(most if gib is None else min(most, gib) for gib in present.gpus)
        present = dataclasses.replace(present, gpus=gpus)
    plan = preflight.make(cfg, asynchronous, present).plan
    words = [f"inference_model.gpu_memory_utilization={plan.gpu_memory_utilization}"]
    return [*words, "inference_model.sleep=true"] if plan.sleeps else words


def needs_machine(name: str) -> Callable[[Context], str]:
    """Return the check of whether the machine is one that the recipe is for; a CPU runs all, but tiny."""
    size = _GPUS.fullmatch(name)

    def lacks(context: Context) -> str:
        if not context.gpus:
            return ""
        if size is None:
            return "it is for a machine without a GPU"
        count, gib = int(size[1] or 1), int(size[2])
        large = [gpu for gpu in hardware.present().gpus if gpu is None or gpu >= _USABLE * gib]
        return "" if len(large) >= count else f"it needs {count} x {gib} GB of GPU memory"

    return lacks
