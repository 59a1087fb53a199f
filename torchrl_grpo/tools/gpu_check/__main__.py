"""Run the stages one after the other, and write the result of each at once.

``python -m torchrl_grpo.tools.gpu_check [overrides ...] [--only STAGE ...] [--model NAME]``

It runs on a CPU too, with a small random model. At the end it prints a table and names the JSON file, both of
which can be pasted into an issue.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from torchrl_grpo.errors import UserError
from torchrl_grpo.runtime import hardware
from torchrl_grpo.runtime.files.closed_output import quiet_end
from torchrl_grpo.tools.gpu_check.results import Result, Status, line, table, write
from torchrl_grpo.tools.gpu_check.stages import STAGES, Context, Stage
from torchrl_grpo.tools.processes import work_folder

RESULTS = "gpu_check.json"


@quiet_end()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code: 0 if no stage failed, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m torchrl_grpo.tools.gpu_check",
        # After the stages, an override would be taken for one.
        usage="%(prog)s [overrides ...] [--only STAGE ...] [--skip STAGE ...] [options]",
        description="Check in stages of about a minute that this machine trains correctly.",
        epilog="Stages: " + "; ".join(f"{name}: {stage.shows}" for name, stage in STAGES.items()) + ".",
    )
    parser.add_argument("--only", nargs="+", choices=list(STAGES), help="run these stages only")
    parser.add_argument("--skip", nargs="+", choices=list(STAGES), default=[], help="leave these stages out")
    parser.add_argument("--model", help="model.name; by default smollm2-135m with a GPU, else a random one")
    parser.add_argument("--folder", type=Path, help="folder for runs and results; by default a new one")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that a stage may take (600)")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="further words of every run")
    arguments = parser.parse_args(argv)
    if arguments.measure is not None:
        return _measure(*arguments.measure)
    folder = work_folder(parser, arguments.folder, "gpu-check-")
    try:
        gpus = len(hardware.present().gpus)
        context = Context(
            folder, _model(arguments.model, gpus, folder), gpus, arguments.overrides, arguments.limit
        )
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    results: list[Result] = []
    for name in [name for name in arguments.only or STAGES if name not in arguments.skip]:
        results.append(run_stage(name, STAGES[name], context))
        write(folder / RESULTS, results)
        print(line(results[-1]), flush=True)
    print(f"\n{table(results)}\n{folder / RESULTS} has all figures, and {folder} the runs")
    return int(any(result.status is Status.failed for result in results))


def run_stage(name: str, stage: Stage, context: Context) -> Result:
    """Run one stage; an error is its result."""
    missing = stage.lacks(context)
    if missing:
        return Result(name, Status.skipped, reason=missing)
    start = time.monotonic()
    try:
        figures = stage.run(context)
    except Exception as error:  # noqa: BLE001  whatever is wrong with the machine is the result
        reason = f"{type(error).__name__}: {error}"
        return Result(name, Status.failed, time.monotonic() - start, reason=reason)
    return Result(name, Status.passed, time.monotonic() - start, figures)


def _measure(name: str, model: str, answer: str) -> int:
    """Run one measurement in this process, as a stage's subprocess, and write its figures into a file."""
    from torchrl_grpo.tools.gpu_check import kernels, step

    functions = {
        "environment": kernels.environment,
        "scores": kernels.scores,
        "flash": kernels.flash,
        "step": step.step,
    }
    Path(answer).write_text(json.dumps(functions[name](Path(model))))
    return 0


def _model(name: str | None, gpus: int, folder: Path) -> Path:
    from torchrl_grpo.config.schema import ModelConfig
    from torchrl_grpo.models import loading, smollm2

    if name is not None:
        return Path(loading.resolve(ModelConfig(name=name)))
    source = smollm2.prepare()
    return source if gpus else _small_model(source, folder / "model")


def _small_model(source: Path, folder: Path) -> Path:
    """Write a random model with the tokenizer of another one, small enough for a CPU."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(source)
    config.update({"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96})
    # The smallest heads that vLLM's kernels for CPUs take.
    config.update({"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    raise SystemExit(main())
