"""``grpo-eval``: measure a model on a task, and compare it with another on the same problems.

It evaluates as a run does, so the checkpoint of a run gets the number that the run has measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torchrl_grpo.checkpoints.run_dir import new_folder
from torchrl_grpo.cli import model_argument
from torchrl_grpo.cli.checked_job import compose_job, resolve_job
from torchrl_grpo.cli.endings import run_tool
from torchrl_grpo.cli.model_argument import ModelArgument
from torchrl_grpo.config import Config
from torchrl_grpo.config.checks import check_installed
from torchrl_grpo.config.public import public_config
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.models import kind, shape
from torchrl_grpo.observe import evaluation_files
from torchrl_grpo.observe.evaluation_files import Measured
from torchrl_grpo.runtime import screen
from torchrl_grpo.runtime.config_dir import config_dir


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command: see :func:`~torchrl_grpo.cli.endings.run_tool`."""
    run_tool(_parser(), _run, argv)


def _run(args: argparse.Namespace) -> None:
    names = [args.model, *([] if args.against is None else [args.against])]
    models = [model_argument.read(name) for name in names]
    cfg = _task(args, models[0])
    with tempfile.TemporaryDirectory() as temporary:
        configs = [
            model_argument.with_model(cfg, model, Path(temporary) / str(number), args.trust_run)
            for number, model in enumerate(models)
        ]
        for each in configs:
            shape.check_available(each.model)
            kind.check_kind(each.model)
        folder = _new_folder(args.output or Path(time.strftime("evaluations/%Y-%m-%d/%H-%M-%S")))
        measured: list[Measured] = []
        try:
            with screen.log_to_file(folder / "eval.log"):
                for each, model in zip(configs, models, strict=True):
                    measured.append(_measure(each, model))
                    # The first result is not lost if the second model fails.
                    evaluation_files.write(folder, cfg.env.dataset, public_config(cfg), measured)
        finally:
            if measured:
                sys.stdout.write(f"{_table(measured)}\nWritten to {folder.resolve()}\n")


def _parser() -> argparse.ArgumentParser:
    parser = model_argument.parser(
        "grpo-eval",
        "Measure a model on held-out problems. Without --config-name, a run is measured on its own task.",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="keys, as for the training command")
    parser.add_argument("--against", metavar="OTHER", help="model to compare with, on the same problems")
    parser.add_argument("--config-name", "-cn", help="primary configuration of the task")
    parser.add_argument("--config-dir", "-cd", type=Path, help="folder with configurations of your own")
    parser.add_argument(
        "--trust-run", action="store_true", help="run code that the configuration of a run names"
    )
    parser.add_argument(
        "--output", type=Path, help="new folder for the results (evaluations/DATE/TIME by default)"
    )
    return parser


def _task(args: argparse.Namespace, model: ModelArgument) -> Config:
    """Return the configuration of the task: that of the command line, or else that of the run."""
    from torchrl_grpo.cli.compose import composer, open_free_form, write_override

    own = None if model.checkpoint is None else model_argument.config_of(model.checkpoint)
    if own is None or args.config_name is not None:
        words = [] if own is None else [write_override("model.name", own.model.name)]
        cfg = compose_job([*words, *args.overrides], args.config_name or "grpo_gsm8k", args.config_dir)
    else:
        from omegaconf import OmegaConf

        node = OmegaConf.create(dataclasses.asdict(own))
        with composer(config_dir(), "grpo_gsm8k") as tree:
            written = tree.values([open_free_form(word) for word in args.overrides])
        if not args.trust_run:
            model_argument.check_trusted(model, own, written)
        for key, value in written.items():
            OmegaConf.update(node, key, value, force_add=True)
        cfg = resolve_job(node, lambda parsed: None) if args.overrides else own
    cfg = _without_training(cfg)
    check_installed(cfg)
    return cfg


def _without_training(cfg: Config) -> Config:
    """Return a configuration that needs one process, and no reference model."""
    train = replace(
        cfg.train_model, num_devices="auto", devices=None, parallelism=Config().train_model.parallelism
    )
    return replace(
        cfg,
        train_model=train,
        policy=replace(cfg.policy, kl_coef=0.0, init_kl_coeff=None, kl_target=None, distill_coef=0.0),
        ref_model=replace(cfg.ref_model, num_devices="auto", devices=None),
    )


def _new_folder(folder: Path) -> Path:
    try:
        return new_folder(folder)
    except OSError as error:
        raise ConfigError(
            f"--output={folder}: the folder cannot be made ({error.strerror}); write --output=FOLDER with "
            "another one"
        ) from error


def _measure(cfg: Config, model: ModelArgument) -> Measured:
    from torchrl_grpo.training import job

    metrics, rows = job.evaluate_problems(cfg, model.checkpoint)
    return Measured(model.text, metrics, rows)


def _table(models: Sequence[Measured]) -> str:
    kinds = {"eval/accuracy": "accuracy", "eval/primary": "reward", "eval/loss": "loss"}
    # Without eval.threshold, an own reward has an accuracy only where it gave both 0 and 1 and nothing else.
    # So one model may have it and the other not.
    what = next(kind for name, kind in kinds.items() if all(name in model.metrics for model in models))
    lines = ["", f"held-out {what}, {models[0].num_problems} problems"]
    for model in models:
        value, bounds = model.primary
        lines.append(f"  {value:.3f}   {_interval(bounds, '')}   {model.name}")
    if len(models) == 2:
        mean, bounds = evaluation_files.difference(*models)
        lines.append(f"  {mean:+.3f}  {_interval(bounds, '+')}  difference, on the same problems")
    return "\n".join(lines)


def _interval(bounds: tuple[float, float] | None, sign: str) -> str:
    if bounds is None:
        return ""
    return f"(95 % interval {bounds[0]:{sign}.3f} to {bounds[1]:{sign}.3f})"
