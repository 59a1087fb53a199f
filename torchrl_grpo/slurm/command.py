"""The command: read its arguments, check the run for the job's nodes, and print the batch script."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

from torchrl_grpo.cli.arguments import Parser
from torchrl_grpo.cli.checked_job import compose_job
from torchrl_grpo.cli.commands import COMMANDS
from torchrl_grpo.cli.endings import USER_ERROR_CODE
from torchrl_grpo.cli.main import Command
from torchrl_grpo.config import Config
from torchrl_grpo.errors import ConfigError, UserError
from torchrl_grpo.planning.plan import OWN_GPU
from torchrl_grpo.runtime.files.closed_output import quiet_end
from torchrl_grpo.slurm import layout
from torchrl_grpo.slurm.layout import Layout
from torchrl_grpo.slurm.options import USUAL_SIGNAL_S, SlurmOptions
from torchrl_grpo.slurm.script import FOLDER_TRANSFER, Run, batch_script, uses_job_folder

# Keys that the batch script sets.
_SET_BY_JOB = ("resume", "hydra.run.dir", "hydra.sweep.dir", "hydra.mode")
_ENGINE_ARGS = "inference_model.engine_args"


@quiet_end()
def main(argv: Sequence[str] | None = None) -> int:
    """Print the batch script, or the mistake; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        text = script_for(arguments)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return USER_ERROR_CODE
    sys.stdout.write(text)
    return 0


def script_for(arguments: Sequence[str]) -> str:
    """Return the batch script for the arguments of a command line.

    Raises:
        UserError: an option or an override is wrong, or the run does not fit on the nodes.
    """
    parsed = _parser().parse_intermixed_args(arguments)
    options = _slurm_options(parsed)
    options.check()
    script = COMMANDS[parsed.script]
    for override in parsed.overrides:
        key = override.lstrip("+~").partition("=")[0]
        if key in _SET_BY_JOB:
            raise ConfigError(f"{override}: the batch script sets {key}; remove it")
    config_name = (parsed.config_name or script.config_name).removesuffix(".yaml")
    compose = partial(compose_job, config_name=config_name, extra_dir=parsed.config_dir, check=script.check)
    cfg = compose(parsed.overrides)
    layout.check_script(parsed.script, cfg, options.nodes)
    job_layout, trainer_overrides = _lay_out(cfg, parsed.overrides, script, options, compose)
    config_dir_option = [f"--config-dir={parsed.config_dir}"] if parsed.config_dir else []
    run = Run(
        script=parsed.script,
        common=[f"--config-name={config_name}", *config_dir_option],
        trainer_overrides=trainer_overrides,
        server_overrides=parsed.overrides,
        command=shlex.join(["python", "-m", "torchrl_grpo.slurm", *arguments]),
    )
    return batch_script(run, options, job_layout)


def _lay_out(
    cfg: Config,
    user_overrides: Sequence[str],
    script: Command,
    options: SlurmOptions,
    compose: Callable[[Sequence[str]], Config],
) -> tuple[Layout, list[str]]:
    """Return the layout, and the overrides of the trainer except those known only inside the job.

    Args:
        cfg: configuration of the run.
        user_overrides: overrides that the user wrote.
        script: command that the job runs.
        options: options of the job.
        compose: function that composes overrides to a configuration.
    """
    overrides, nodes, gpus = list(user_overrides), options.nodes, options.gpus
    if nodes == 1:
        return Layout(layout.place(cfg, script.asynchronous, gpus), 1, gpus), overrides
    if layout.needs_servers(cfg, nodes):
        count = layout.count_engines(cfg, script.asynchronous, nodes, gpus)
        # Arguments of the engine go to the servers, and a run with a list of servers refuses them.
        overrides = [item for item in overrides if not item.lstrip("+").startswith(_ENGINE_ARGS)]
        if not any(item.startswith("inference_model.weight_transfer=") for item in overrides):
            # The nodes share a file system and no memory.
            overrides.append(FOLDER_TRANSFER)
        addresses = ",".join(f"http://node:{port}" for port in range(1, count + 1))
        folder = ["inference_model.weight_folder=weights"] if uses_job_folder(overrides) else []
        cfg = compose([*overrides, *folder, f"inference_model.servers=[{addresses}]"])
        layout.check_transfer(cfg)
        plan = layout.place(cfg, script.asynchronous, gpus)
        return Layout(plan, nodes, gpus, count, servers=True), overrides
    cfg = replace(cfg, ray=replace(cfg.ray, address="node:1"))
    count = layout.count_engines(cfg, script.asynchronous, nodes, gpus)
    overrides = [*overrides, f"inference_model.num_devices={count}"]
    if (
        gpus
        and cfg.inference_model.gpu_memory_utilization is None
        and cfg.inference_model.engine.has_known_needs
    ):
        # Ray has only the GPUs that the trainer leaves, so none of them is shared.
        overrides.append(f"inference_model.gpu_memory_utilization={OWN_GPU}")
    cfg = compose([*overrides, "ray.address='node:1'"])
    plan = layout.place(cfg, script.asynchronous, gpus)
    return Layout(plan, nodes, gpus, count), overrides


def _slurm_options(arguments: argparse.Namespace) -> SlurmOptions:
    values = {field.name: getattr(arguments, field.name) for field in fields(SlurmOptions)}
    return SlurmOptions(**values | {"job_name": arguments.job_name or arguments.script})


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m torchrl_grpo.slurm",
        description="Print the batch script of a run for Slurm. All other arguments are the same as for the "
        "training command.",
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE", help="overrides of the configuration")
    add("--script", choices=COMMANDS, default="grpo", help="training command (default: grpo)")
    add("--config-name", "-cn", help="primary configuration")
    add("--config-dir", "-cd", type=Path, help="folder with configurations of your own")
    add("--nodes", type=int, default=1, help="number of nodes (default: 1)")
    add("--gpus-per-node", default="0", metavar="[TYPE:]N", help="GPUs of each node (default: 0)")
    add("--cpus-per-node", type=int, metavar="N", help="cores of each node")
    add("--memory-per-node", metavar="SIZE", help="memory of each node, e.g. 200G")
    add("--time", help="time limit, e.g. 24:00:00")
    add("--partition", help="partition")
    add("--account", help="account")
    add("--qos", help="quality of service")
    add("--mail-user", metavar="ADDRESS", help="where Slurm writes to")
    add("--mail-type", default="END,FAIL", metavar="EVENTS", help="when it writes (default: END,FAIL)")
    add("--job-name", help="name of the job (default: that of the training command)")
    add(
        "--sbatch",
        dest="extra",
        action="append",
        default=[],
        metavar="OPTION",
        help="one more option of sbatch, e.g. --sbatch=--exclusive; repeatable",
    )
    add(
        "--setup",
        action="append",
        default=[],
        metavar="LINE",
        help="line that sets up the environment; repeatable",
    )
    add("--folder", default="outputs/slurm", help="folder for the jobs' folders (default: outputs/slurm)")
    add(
        "--signal-seconds",
        type=int,
        metavar="S",
        help=f"seconds before the time limit at which the run saves itself (default: {USUAL_SIGNAL_S}, or a "
        "third of a shorter --time)",
    )
    add(
        "--start-seconds",
        type=int,
        default=1800,
        metavar="S",
        help="seconds that servers, or nodes of Ray, have to come up (default: 1800)",
    )
    add("--template", type=Path, metavar="FILE", help="template of your own for the script")
    return parser
