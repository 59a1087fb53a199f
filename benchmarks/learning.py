"""``python -m benchmarks.learning EXPERIMENT``: what is learned, over several seeds, with intervals.

An experiment has one arm or several. An arm is one command, or several of which each takes the model of the
one before. Arms that begin with the same commands share their runs. Every arm runs with each seed. For every
held-out accuracy the table has the mean before, the values after, the mean seconds of the last command, the
rise, and the paired difference to the first arm. The last two have 95 % intervals over the seeds, of
Student's t distribution. The arms of ``pictures`` begin with the model of :mod:`benchmarks.small_vlm`, which
is made for each seed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import small_vlm
from torchrl_grpo.sweep.statistics import interval

_ROOT = Path(__file__).resolve().parent.parent
_GRPO, _SFT = "sota-implementations/grpo/grpo.py", "sota-implementations/sft/sft.py"


@dataclass(frozen=True)
class Stage:
    """One command of an arm: a script, its words, and the key that gets the model of the command before."""

    script: str
    words: tuple[str, ...]
    takes: str = "model.name"


_SUMS = ("--config-name=grpo_quickstart", "eval.num_problems=200")
_GRPO_SUMS = Stage(_GRPO, _SUMS)
_SFT_SUMS = Stage(_SFT, ("--config-name=sft_quickstart", "eval.num_problems=200"))


def _arithmetic(name: str, operator: str, example: str) -> str:
    """Return a part of a mixture: arithmetic with two numbers up to 10."""
    return (
        f"{{name: {name}, dataset: reasoning_gym, task: basic_arithmetic, answer_format: equation, "
        f"system_prompt: 'Reply like this: {example}', task_args: {{min_terms: 2, max_terms: 2, "
        f"min_digits: 1, max_digits: 1, operators: ['{operator}'], allow_parentheses: false, "
        "format_style: natural}, reward: {weights: {reasoning_gym: 1.0, closeness: 0.3, bare_number: 0.1}}}"
    )


_MIXTURE = f"[{_arithmetic('sums', '+', '1 + 1 = 2')}, {_arithmetic('differences', '-', '5 - 2 = 3')}]"
# Sums of two or three numbers of one or two digits: some are easy, and some hard.
_SUMS_OF_ALL_SIZES = (
    *_SUMS,
    "env.task_args.max_terms=3",
    "env.task_args.max_digits=2",
    "inference_model.max_new_tokens=20",
    "env.task_size=512",
)
# How many shapes of a color or a form are in a small picture. There are more such pictures than a run draws,
# so many problems can be held out. Short prompts and answers make most of a step the picture.
_SHAPES = (
    "env.dataset=pictures",
    "env.task_args={kinds:[count],size:32}",
    "env.task_size=50000",
    "env.prompt_template='{question}'",
    "env.answer_format=plain",
    "model.pictures=true",
    "train_model.vision_tower=true",
    "train_model.autocast=no",
    "inference_model.dtype=float32",
    "inference_model.max_model_len=48",
    "inference_model.max_new_tokens=4",
    "reward.weights={exact_match: 1.0}",
    # GRPO trains how often a sampled response is right, so that is what is measured.
    "eval.num_problems=300",
    "eval.samples=4",
    "eval.temperature=1.0",
    "optimizer.betas=[0.9,0.99]",
)
_SFT_SHAPES = Stage(
    _SFT,
    (
        *_SHAPES,
        "env.num_envs=32",
        "train.total_dialog_turns=12288",
        "eval.frequency=0",
        "optimizer.lr=1e-3",
        "optimizer.warmup_steps=20",
        "inference_model.backend=transformers",
    ),
)
_GRPO_SHAPES = Stage(
    _GRPO,
    (
        *_SHAPES,
        # Few steps, each with the gradient of many responses. With 512 a step and 1e-3, the model became sure
        # of wrong answers.
        "env.num_envs=128",
        "env.repeats=8",
        "train.total_dialog_turns=32768",
        "eval.frequency=16",
        "optimizer.lr=7e-4",
        "optimizer.warmup_steps=2",
        "optimizer.schedule=linear",
        "optimizer.min_lr_ratio=0.2",
        "inference_model.enforce_eager=true",
    ),
)
# A short run, because Muon's update of all weights takes longer on a CPU than the rest of the step.
_SHORT_SUMS = (*_SUMS, "env.num_envs=4", "train.total_dialog_turns=384", "eval.frequency=0")

# A game on an OpenEnv server, whose package is in an environment of its own (scripts/setup_openenv.sh).
_OPENENV_PYTHON = os.environ.get("OPENENV_PYTHON", f"{_ROOT}/.venv-openenv/bin/python")
_ECHO = (
    "--config-name=grpo_quickstart",
    f'env.environment="openenv:{_OPENENV_PYTHON} {_ROOT}/examples/echo_game.py {{port}}"',
    "env.dataset=torchrl_grpo.envs.episodes.openenv.problems:seeds",
    "env.task_args={size:400,held_out:100}",
    "env.answer_format=plain",
    "env.system_prompt=null",
    "env.max_turns=2",
    "env.max_turn_tokens=16",
    "inference_model.max_model_len=160",
    "inference_model.max_new_tokens=64",
    "reward.weights={environment:1.0}",
    "eval.num_problems=100",
    "eval.frequency=0",
    "train.total_dialog_turns=768",
    "optimizer.lr=2e-5",
)

EXPERIMENTS: dict[str, dict[str, tuple[Stage, ...]]] = {
    # Supervised fine-tuning and GRPO on one task, and one after the other.
    "sft": {
        "GRPO": (_GRPO_SUMS,),
        "SFT": (_SFT_SUMS,),
        "SFT, then GRPO": (_SFT_SUMS, Stage(_GRPO, _SUMS)),
    },
    # The untrained model is taught by the model that GRPO trained: with the sampled tokens, and with those
    # that the teacher finds most probable.
    "distill": {
        "GRPO, the teacher": (_GRPO_SUMS,),
        # No more seconds than the others take.
        "SFT": (Stage(_SFT, (*_SFT_SUMS.words, "train.total_dialog_turns=216")),),
        "distillation": (_GRPO_SUMS, Stage(_GRPO, (*_SUMS, "policy=distill"), "teacher_model.name")),
        "distillation, top 16": (
            _GRPO_SUMS,
            Stage(_GRPO, (*_SUMS, "policy=distill", "policy.distill_top_k=16"), "teacher_model.name"),
        ),
    },
    # A game of several turns.
    "episodes": {
        "guess": (
            Stage(
                _GRPO,
                ("--config-name=grpo_guess", "eval.num_problems=132", "train.total_dialog_turns=2048"),
            ),
        )
    },
    # A game of another program, in two turns.
    "openenv": {"echo": (Stage(_GRPO, _ECHO),)},
    # Two tasks at once.
    "mixture": {
        "mixture": (
            Stage(
                _GRPO,
                (*_SUMS, "env=gsm8k", f"env.mixture={_MIXTURE}", "train.total_dialog_turns=2048"),
            ),
        )
    },
    # The same task with problems drawn uniformly, and by their pass rate.
    "curriculum": {
        "uniform": (Stage(_GRPO, _SUMS_OF_ALL_SIZES),),
        "pass rate": (Stage(_GRPO, (*_SUMS_OF_ALL_SIZES, "env.sampling=pass_rate")),),
    },
    # A small model for pictures, trained from scratch by SFT, and then improved by GRPO.
    "pictures": {"SFT": (_SFT_SHAPES,), "SFT, then GRPO": (_SFT_SHAPES, _GRPO_SHAPES)},
    # The same task with each optimizer.
    "optimizers": {
        name: (Stage(_GRPO, (*_SHORT_SUMS, f"optimizer.name={name}", f"optimizer.lr={rate}")),)
        for name, rate in (("adamw", 2e-5), ("adamw_8bit", 2e-5), ("muon", 2e-4))
    },
}
# For each accuracy, its value before and after training.
Accuracies = dict[str, tuple[float, float]]
SECONDS = "seconds of the last command"


def run_stages(
    stages: Sequence[Stage],
    seed: int,
    folders: Sequence[Path],
    words: Sequence[str],
    model: Path | None = None,
) -> None:
    """Run the commands of an arm that have not run yet.

    Args:
        stages: commands; each takes the last model of the one before.
        seed: seed of the runs.
        folders: folder of each run.
        words: further words of every command.
        model: model that the first command begins with; None for that of its configuration.
    """
    last = [] if model is None else [str(model)]
    for stage, run in zip(stages, folders, strict=True):
        if not (run / "summary.json").is_file():
            command = [
                sys.executable,
                str(_ROOT / stage.script),
                *stage.words,
                f"seed={seed}",
                *(f"{stage.takes}={model}" for model in last),
                *words,
            ]
            subprocess.run([*command, f"hydra.run.dir={run}", "logging.progress=false"], check=True)
        last = [f"{run}/checkpoints/{_lines(run)[-1]['step']}/model"]


def first_model(arms: Mapping[str, Sequence[Stage]], seed: int, folder: Path) -> Path | None:
    """Return the model that the first commands begin with, made if needed; None for their configurations'."""
    if arms is not EXPERIMENTS["pictures"]:
        return None
    model = folder / f"small-vlm-{seed}"
    if not model.is_dir():
        small_vlm.build(model, seed)
    return model


def folders_of(
    stages: Sequence[Stage], arms: Mapping[str, Sequence[Stage]], seed: int, folder: Path
) -> list[Path]:
    """Return the folder of each run of an arm. Arms that begin with the same commands share their runs."""
    ends = range(1, len(stages) + 1)
    return [folder / _named(_first_with(stages[:end], arms), seed) / str(end - 1) for end in ends]


def _accuracies(folders: Sequence[Path]) -> Accuracies:
    """Return the results of an arm.

    Returns:
        For each accuracy in ``metrics.jsonl``, its value before the first command and after the last. Under
        SECONDS is how long the last command took, twice.
    """
    before, after = _measured(_lines(folders[0])[0]), _measured(_lines(folders[-1])[-1])
    seconds = json.loads((folders[-1] / "summary.json").read_text())["seconds"]
    return {**{name: (before[name], after[name]) for name in before}, SECONDS: (seconds, seconds)}


def _measured(line: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in line.items() if name.endswith("/accuracy")}


def _lines(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _shown(values: Sequence[float]) -> str:
    """Return the mean of values, and half the width of its 95 % interval; NaN for one value."""
    if len(values) == 1:
        return f"{values[0]:+.3f} ± nan"
    return "{:+.3f} ± {:.3f}".format(*interval(np.array(values)[:, None]))


def table(accuracies: dict[str, list[Accuracies]]) -> str:
    """Return the results as Markdown.

    Args:
        accuracies: for each arm, the accuracies before and after of each seed.
    """
    lines = [
        "| arm | accuracy | before | after, by seed | seconds | rise | difference to the first arm |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    first = next(iter(accuracies.values()))
    for arm, seeds in accuracies.items():
        seconds = statistics.fmean(seed[SECONDS][0] for seed in seeds)
        for name in (name for name in seeds[0] if name != SECONDS):
            before = statistics.fmean(seed[name][0] for seed in seeds)
            after = ", ".join(f"{seed[name][1]:.3f}" for seed in seeds)
            rise = _shown([seed[name][1] - seed[name][0] for seed in seeds])
            pairs = [own[name][1] - other[name][1] for own, other in zip(seeds, first, strict=True)]
            difference = "" if seeds is first else _shown(pairs)
            lines.append(
                f"| {arm} | {name} | {before:.3f} | {after} | {seconds:.0f} | {rise} | {difference} |"
            )
    return "\n".join(lines)


def _first_with(stages: Sequence[Stage], arms: Mapping[str, Sequence[Stage]]) -> str:
    """Return the first arm that begins with these commands."""
    return next(arm for arm, own in arms.items() if own[: len(stages)] == stages)


def _named(arm: str, seed: int) -> str:
    return f"{arm} {seed}".replace(",", "").replace(" ", "-")


def main() -> None:
    """Run an experiment and print its table. Runs that are already in the folder are not repeated."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("words", nargs="*", help="further words of every command, key=value")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, required=True, help="folder for the runs")
    args = parser.parse_intermixed_args()
    arms = EXPERIMENTS[args.experiment]
    accuracies: dict[str, list[Accuracies]] = {arm: [] for arm in arms}
    # Seed by seed, so that what has been measured can be compared at any time.
    for seed in range(args.seeds):
        model = first_model(arms, seed, args.folder.resolve())
        for arm, stages in arms.items():
            folders = folders_of(stages, arms, seed, args.folder.resolve())
            run_stages(stages, seed, folders, args.words, model)
            accuracies[arm].append(_accuracies(folders))
        print(f"\n{seed + 1} seed(s)\n{table(accuracies)}", flush=True)


if __name__ == "__main__":
    main()
