"""The command line of the scripts: parse it, check it completely, then let Hydra run the jobs.

A mistake in a configuration is reported as one line on stderr with exit code 2. This happens before
a folder is created and before torch is imported. A ``UserError`` raised by a running job is reported
the same way. Any other exception is a bug in this project and keeps its traceback.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_grpo.checkpoints import run_dir
from torchrl_grpo.cli import multirun, sweep
from torchrl_grpo.cli.arguments import read_arguments
from torchrl_grpo.cli.checked_job import existing_folder, resolve_job, write_notes
from torchrl_grpo.cli.endings import USER_ERROR_CODE, exit_codes, report
from torchrl_grpo.cli.help import help_text
from torchrl_grpo.config import Config, derived, parse
from torchrl_grpo.config.checks import check_installed, schedule
from torchrl_grpo.config.schema import SweepConfig
from torchrl_grpo.config.values import TrainMethod
from torchrl_grpo.distributed import launch
from torchrl_grpo.errors import ConfigError, RanksApart, UserError
from torchrl_grpo.models import shape
from torchrl_grpo.runtime import hardware, rank_env
from torchrl_grpo.runtime.config_dir import config_dir
from torchrl_grpo.runtime.files.closed_output import quiet_end
from torchrl_grpo.runtime.interrupts import ignore_terminations, stop_signal_blocked
from torchrl_grpo.runtime.package_versions import versions
from torchrl_grpo.runtime.quoting import quote

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from torchrl_grpo.cli.compose import Job
    from torchrl_grpo.planning.planned import Planned


@dataclass(frozen=True)
class Command:
    """A training command.

    Attributes:
        run: ``"module:function"`` of ``run(cfg: Config, run_dir: Path) -> dict``, imported only
            when a job starts.
        config_name: primary configuration to use if the command line names none.
        asynchronous: whether the command's engines generate while the trainer trains.
        method: what the command learns from.
    """

    run: str = "torchrl_grpo.training.job:run"
    config_name: str = "grpo_gsm8k"
    asynchronous: bool = False
    method: TrainMethod = TrainMethod.grpo

    def check(self, cfg: Config) -> None:
        """Check what the command requires beyond :func:`~torchrl_grpo.config.checks.validate`.

        Raises:
            ConfigError: the configuration is for another command, or keys contradict each other.
        """
        schedule.check_method(cfg, self.method)
        if self.asynchronous:
            schedule.check_async(cfg)
        else:
            schedule.check_sync(cfg)
            schedule.check_takes_turns(cfg)


@quiet_end()
def main(command: Command, argv: Sequence[str] | None = None) -> None:
    """Run a command line.

    Args:
        command: what it runs.
        argv: arguments after the script's name; those of this process by default.

    Raises:
        SystemExit: with code 2 for a user error, 130 for an interrupt, 143 for SIGTERM, 75 if the run was
            asked to stop, 141 if nobody reads the output.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    # Imports and composition allocate much and free little. Garbage collection would take 7 % of their time.
    gc.disable()
    line: _CommandLine | None = None

    def is_shared(error: UserError) -> bool:
        # Every rank parses the same command line.
        alike = isinstance(error, ConfigError) or line is None or not line.follows
        return alike and not isinstance(error, RanksApart)

    try:
        with exit_codes(is_shared), stop_signal_blocked():
            line = _CommandLine(command, words)
            line.execute()
    finally:
        gc.enable()


class _CommandLine:
    """One command line, from its arguments to its jobs."""

    def __init__(self, command: Command, words: list[str]) -> None:
        self.command = command
        self.words = words
        self.args = read_arguments(words)
        # Whether this process has begun to serve as a rank other than rank 0.
        self.follows = False
        self.config_dir = config_dir().resolve()
        if self.args.config_path is not None:
            self.config_dir = existing_folder("--config-path", self.args.config_path)
        self.extra_dir = (
            existing_folder("--config-dir", self.args.config_dir) if self.args.config_dir else None
        )
        self.config_name = (self.args.config_name or command.config_name).removesuffix(".yaml")
        self.sweep = self.args.multirun or "hydra.mode=MULTIRUN" in self.args.overrides
        self.reported: list[UserError] = []
        # The only job of the command line and its overrides, once composed.
        self._composed: tuple[list[str], Job] | None = None
        # The next best division of the GPUs for the only job. A dry run compares it with the chosen one.
        self._other_plan: Planned | None = None
        # Folder that the command reads or writes, for errors of the system; None before it is known.
        self.run_folder: Path | None = None

    def execute(self) -> None:
        """Run the action that the command line selects."""
        if self.args.help:
            default, method = self.command.config_name, self.command.method
            sys.stdout.write(help_text(sys.argv[0], self.config_dir, default, method))
        elif self.args.version:
            sys.stdout.write("".join(f"{name} {version}\n" for name, version in versions().items()))
        elif self.args.hydra_help or self.args.shell_completion:
            self._hydra([*self._flags(), *self._overrides()])
        elif self.args.cfg == "job":
            self._show()
        elif self.args.cfg or self.args.info:
            for _ in self._jobs():
                pass
            self._hydra([*self._flags(), *self._overrides()])
        else:
            try:
                self._train()
            except Exception as error:
                explained = run_dir.explain(error, self.run_folder) if self.run_folder else None
                if explained is None:
                    raise
                raise explained from error

    def _overrides(self) -> list[str]:
        from torchrl_grpo.cli.compose import open_free_form

        return [open_free_form(word) for word in self.args.overrides]

    def _flags(self) -> list[str]:
        """Return the options for Hydra, with absolute folders: Hydra resolves relative paths differently."""
        args = self.args
        switches = {
            "--hydra-help": args.hydra_help,
            "--shell-completion": args.shell_completion,
            "--resolve": args.resolve,
            "--multirun": self.sweep and not args.cfg and not args.info,
        }
        values = {"--cfg": args.cfg, "--package": args.package, "--info": args.info}
        values["--config-dir"] = str(self.extra_dir) if self.extra_dir else None
        flags = [flag for flag, is_set in switches.items() if is_set]
        for flag, value in values.items():
            flags += [] if value is None else [flag, value]
        return flags

    def _jobs(self) -> Generator[Job, None, None]:
        """Compose the jobs of the command line one by one; a job is valid until the next one is composed."""
        from torchrl_grpo.cli.compose import composer

        words = self._overrides()
        if self._composed is not None and self._composed[0] == words:
            yield self._composed[1]
            return
        with composer(self.config_dir, self.config_name, self.extra_dir) as tree:
            jobs = tree.jobs(words, self.sweep)
            for number, overrides in enumerate(jobs):
                job = tree.compose(overrides, number)
                # Composing takes longer than all checks, so do it once for the only job.
                self._composed = (words, job) if len(jobs) == 1 else None
                yield job

    def _show(self) -> None:
        from omegaconf import OmegaConf

        for job in self._jobs():
            part: Any = job.node
            if self.args.package not in (None, "_global_"):
                part = OmegaConf.select(job.node, self.args.package)
                if part is None:
                    raise ConfigError(
                        f"--package={self.args.package}: there is no such group of keys; "
                        f"write one of {', '.join(str(key) for key in job.node)} instead"
                    )
            is_group = OmegaConf.is_config(part)
            sys.stdout.write(OmegaConf.to_yaml(part, resolve=self.args.resolve) if is_group else f"{part}\n")
            parse(job.node)

    def _divide_devices(self) -> None:
        """Add the planner's choice of devices to the command line, for ranks and resumed runs too."""
        if rank_env.rank() > 0:
            # Rank 0 decides, and sends the others its configuration.
            return
        from torchrl_grpo.planning import automatic

        configs = [resolve_job(job.node, self.command.check) for job in self._jobs()]
        choice = automatic.choose(configs, self.command.asynchronous, hardware.present())
        self._other_plan = choice.other if len(configs) == 1 else None
        self.args.overrides += automatic.overrides(choice.changes)
        self.words += automatic.overrides(choice.changes)
        sys.stdout.write(automatic.written(choice.changes))

    def _train(self) -> None:
        rank_env.check()
        options = self._sweep_options()
        trials = multirun.Trials.of(options)
        if options.trials is not None:
            self.args.overrides.append(multirun.searcher(options.trials, trials, self.args.overrides))
        if trials is None:
            self._divide_devices()
            job, configs = self._checked()
        else:
            with trials.devices_visible():
                job, configs = self._checked()
        # Computed in a dry run too, because it checks that the jobs of a sweep can run together.
        ranks = launch.ranks_wanted(configs) if trials is None else 1
        is_dry_run = any(cfg.dry_run for cfg in configs)
        if rank_env.rank() > 0:
            if not is_dry_run:
                self._follow(configs)
            return
        if ranks > 1 and not rank_env.launched() and not is_dry_run:
            raise SystemExit(launch.launch(self.words, ranks))
        for line in launch.warnings():
            sys.stderr.write(f"{line}\n")
        if is_dry_run:
            return
        launcher: list[str] = []
        if trials is not None:
            flags = [f"--config-name={self.config_name}", f"--config-path={self.config_dir}"]
            flags += [f"--config-dir={self.extra_dir}"] if self.extra_dir else []
            launcher = [trials.launcher(flags, self._overrides())]
        extra, undo = self._folder(job, configs, options)
        name = Path(sys.argv[0]).stem or "grpo"
        overrides = [f"hydra.job.name={quote(name)}", *self._overrides(), *extra, *launcher]
        try:
            self._hydra([*self._flags(), *overrides])
        except (UserError, SystemExit):
            undo()
            raise
        finally:
            # Of a sweep that has failed in part, the other trials can be compared.
            if self.sweep and self.run_folder is not None:
                sweep.show_if_compared(self.run_folder)

    def _sweep_options(self) -> SweepConfig:
        """Return the options of the sweep, and replace them on the command line by what they stand for."""
        if not self.sweep:
            multirun.refuse_options(self.args.overrides)
            return SweepConfig()
        with contextlib.closing(self._jobs()) as jobs:
            options = parse(next(jobs).node).sweep
        self.args.overrides = multirun.without_options(self.args.overrides, options)
        return options

    def _checked(self) -> tuple[Job, list[Config]]:
        """Check all jobs, or show the plans of a dry run; return the last job and all configurations."""
        configs: list[Config] = []
        for job in self._jobs():
            cfg = resolve_job(job.node, self.command.check)
            write_notes(job)
            if cfg.dry_run and rank_env.rank() == 0:
                from torchrl_grpo.cli import dry_run

                if self.sweep:
                    sys.stdout.write(f"job {len(configs)}\n")
                folder = self._to_resume(cfg, job)
                dry_run.show(cfg, folder, self.command.asynchronous, self._other_plan)
            else:
                check_installed(cfg)
                if cfg.resume is None:
                    # Here, because torch is imported later, and by each training rank. A run that has ended
                    # needs no model.
                    for model in derived.models_of(cfg):
                        shape.check_available(model)
            configs.append(cfg)
        return job, configs

    def _follow(self, configs: list[Config]) -> None:
        """Serve each job as a training rank other than rank 0, which alone writes the run's files."""
        self.follows = True
        gc.enable()
        # A launcher signals all ranks. Rank 0 handles the signal and then releases this rank.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ignore_terminations()
        module, _, _ = self.command.run.partition(":")
        for _ in configs:
            vars(importlib.import_module(module))["follow"]()

    def _to_resume(self, cfg: Config, job: Job) -> Path | None:
        if cfg.resume is None:
            return None
        if self.sweep:
            raise ConfigError(
                f"resume={cfg.resume}: a sweep cannot be resumed in this way; write "
                "resume=multirun/DATE/TIME/JOB without --multirun instead, or, with sweep.devices, "
                "sweep.resume=multirun/DATE/TIME"
            )
        chosen = job.run_dir if self._chosen("hydra.run.dir") else None
        self.run_folder = chosen or Path(cfg.resume)
        resumed = run_dir.folder_to_resume(cfg.resume, chosen)
        self.run_folder = resumed
        return resumed

    def _chosen(self, key: str) -> bool:
        return any(word.lstrip("+").startswith(f"{key}=") for word in self.args.overrides)

    def _folder(
        self, job: Job, configs: list[Config], options: SweepConfig
    ) -> tuple[list[str], Callable[[], None]]:
        """Choose the run folder; return overrides that set it, and a function that undoes a failed start."""
        key = "hydra.sweep.dir" if self.sweep else "hydra.run.dir"
        folder = job.sweep_dir if self.sweep else job.run_dir
        self.run_folder = folder
        for cfg in configs:
            if (resumed := self._to_resume(cfg, job)) is not None:
                run_dir.check_kinds(resumed)
                run_dir.check_unclaimed(resumed)
                record = run_dir.ResumeRecord(resumed)
                words = [f"{key}={quote(str(resumed))}", f"hydra.output_subdir={record.name}"]
                return words, record.undo
            if cfg.resume is not None:
                # resume=auto_or_new without a checkpoint: the job sees a new run.
                self.run_folder = folder
                run_dir.set_aside(folder)
                return ["resume=null"], lambda: None
        if options.resume is not None:
            self.run_folder = multirun.folder_to_resume(options.resume, folder if self._chosen(key) else None)
            return [f"{key}={quote(str(self.run_folder))}"], lambda: None
        if self._chosen(key):
            run_dir.check_free(key, folder)
            run_dir.check_kinds(folder)
            run_dir.check_unclaimed(folder)
            return [], lambda: None
        self.run_folder = created = run_dir.new_folder(folder)
        return [f"{key}={quote(str(created))}"], lambda: run_dir.remove_if_unused(created)

    def _hydra(self, words: list[str]) -> None:
        """Run Hydra. It reads ``sys.argv``, and reports errors itself unless HYDRA_FULL_ERROR is set."""
        import hydra

        from torchrl_grpo.config.parsing import register_schema

        register_schema()
        before, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
        sys.argv = [sys.argv[0], *words]
        os.environ["HYDRA_FULL_ERROR"] = "1"
        try:
            hydra.main(config_path=str(self.config_dir), config_name=self.config_name, version_base="1.3")(
                self._job
            )()
        except UserError as error:
            if not any(error is reported for reported in self.reported):
                raise
            raise SystemExit(USER_ERROR_CODE) from None
        finally:
            sys.argv = before
            if full_error is None:
                del os.environ["HYDRA_FULL_ERROR"]
            else:
                os.environ["HYDRA_FULL_ERROR"] = full_error

    # Hydra would report the error of an output that nobody reads.
    @quiet_end()
    def _job(self, node: DictConfig) -> Any:
        """Run one job inside Hydra."""
        from hydra.core.global_hydra import GlobalHydra
        from hydra.core.hydra_config import HydraConfig

        from torchrl_grpo.cli.precedence import settle

        gc.enable()
        hydra_cfg = HydraConfig.get()
        settle(node, GlobalHydra.instance().config_loader(), self.config_name, hydra_cfg.overrides.task)
        where = f"job {hydra_cfg.job.num} ({hydra_cfg.job.override_dirname}): " if self.sweep else ""
        try:
            cfg = resolve_job(node, self.command.check)
            module, _, name = self.command.run.partition(":")
            function = vars(importlib.import_module(module))[name]
            return function(cfg, Path(hydra_cfg.runtime.output_dir))
        except UserError as error:
            report(error, where)
            if not self.sweep or rank_env.launched():
                # After a failed job the training ranks are in different states and cannot run another job.
                raise SystemExit(USER_ERROR_CODE) from None
            # The other jobs of a sweep continue. Hydra raises the first failure at the end of the sweep.
            self.reported.append(error)
            raise
        except Exception:
            if self.sweep:
                logging.getLogger(__name__).exception("%sfailed", where)
                if rank_env.launched():
                    raise SystemExit(1) from None
            raise
