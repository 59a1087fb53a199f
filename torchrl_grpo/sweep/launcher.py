"""A launcher of Hydra that runs the jobs of a sweep on free devices of this machine, each in its own process.

Any sweeper of Hydra can use it. A trial that has ended is not run again, and one that was interrupted resumes
from its checkpoint, so a sweep goes on where it was.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher

from torchrl_grpo.checkpoints.run_dir import AUTO_OR_NEW, claimed
from torchrl_grpo.errors import ConfigError, UserError
from torchrl_grpo.observe.metrics import METRICS
from torchrl_grpo.planning.cores import allowed_cores
from torchrl_grpo.runtime import own_variables
from torchrl_grpo.runtime.files.shared_files import replace
from torchrl_grpo.runtime.interrupts import STOP_SIGNAL, StopRequested, remember_interrupts, stop_requested
from torchrl_grpo.runtime.quoting import quote
from torchrl_grpo.sweep import plugins
from torchrl_grpo.sweep.hopeless import hopeless
from torchrl_grpo.sweep.processes import TrialProcess
from torchrl_grpo.sweep.table import FAILED, RUNNING, WAITING, Row, StateTable
from torchrl_grpo.sweep.trials import STOPPED, STOPPED_EARLY, UNFINISHED, read_trial, recorded_overrides

if TYPE_CHECKING:
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

# Seconds between two looks at the files of the trials.
_LOOK_S = 3.0
# Bytes at the end of a log that are searched for an error.
_TAIL = 2**18


@dataclass(frozen=True)
class TrialOptions:
    """How trials are run.

    Attributes:
        command: words in front of the overrides of a trial.
        more: overrides behind them.
        varied: keys that have several values, which name a trial on the screen.
        devices: devices of each trial.
        num_gpus: GPUs of this machine; with none, devices are cores.
        hopeless_after: evaluations after which a hopeless trial ends; None ends none.
    """

    command: list[str]
    more: list[str]
    varied: set[str]
    devices: int
    num_gpus: int
    hopeless_after: int | None


def use(options: TrialOptions) -> str:
    """Register the launcher with these options, and return the override that chooses it."""
    TrialLauncher.options = options
    return plugins.register("launcher", "trials", TrialLauncher)


class TrialLauncher(Launcher):
    """The launcher. Hydra makes it, so :func:`use` sets its options on the class."""

    __module__ = plugins.MODULE
    options: TrialOptions

    def __init__(self) -> None:
        self._folder = Path()

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._folder = Path(str(config.hydra.sweep.dir)).absolute()

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        trials = [
            _Trial(self._folder, str(initial_job_idx + at), list(words), self.options)
            for at, words in enumerate(job_overrides)
        ]
        for trial in trials:
            trial.check()
        with claimed(self._folder):
            _Run(self._folder, trials, self.options).run()
        failure = _failure(self._folder, trials)
        return [trial.result(failure) for trial in trials]


class _Trial:
    """One trial of the launcher."""

    def __init__(self, sweep: Path, name: str, words: list[str], options: TrialOptions) -> None:
        self.folder, self.words = sweep / name, words
        self.row = Row(name, " ".join(word for word in words if word.partition("=")[0] in options.varied))
        self.actor: Any = None
        # Reference of Ray to an answer that comes once the trial has its devices.
        self.placed: Any = None
        self.code: int | None = None
        where = [f"hydra.run.dir={quote(str(self.folder))}", f"resume={AUTO_OR_NEW}"]
        self.command = [*options.command, *words, *options.more, *where]
        self.read()

    def check(self) -> None:
        """Refuse to go on with another trial's folder.

        Raises:
            ConfigError: the folder has a trial of another setting.
        """
        recorded = recorded_overrides(self.folder)
        missing = [word for word in self.words if recorded is not None and word not in recorded]
        if missing:
            raise ConfigError(
                f"sweep.resume={self.folder.parent}: trial {self.row.name} was run without {missing[0]}; "
                "write the command as it was, or leave sweep.resume out for a new sweep"
            )

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do."""
        return self.row.state not in (WAITING, RUNNING)

    def read(self) -> None:
        """Read what the trial has written."""
        if not (self.folder / METRICS).is_file():
            return
        try:
            self.row.trial = read_trial(self.folder, with_grades=False)
        except OSError:
            # Somebody has removed or closed the folder. The trial itself says so, and the others go on.
            return
        if self.row.trial.state != UNFINISHED:
            self.row.state = self.row.trial.state

    def stop(self, number: int) -> None:
        """Send a signal to the trial's process."""
        self.actor.stop.remote(number)

    def stop_early(self, evaluations: int) -> None:
        """End the trial for good. It saves a checkpoint first."""
        assert self.row.trial is not None
        replace(self.folder / STOPPED, f'{{"step": {self.row.trial.steps[-1]}, "after": {evaluations}}}\n')
        self.stop(STOP_SIGNAL)

    def end(self, code: int | None) -> None:
        """Note how the process ended."""
        self.code = code
        self.read()
        if not self.is_over:
            self.row.state = FAILED

    def result(self, failure: UserError | None) -> JobReturn:
        """Return what Hydra's sweepers want: the held-out value, or an error."""
        returned = JobReturn(overrides=self.words, working_dir=str(self.folder), task_name="trial")
        is_failed = self.row.state == FAILED
        returned.status = JobStatus.FAILED if is_failed else JobStatus.COMPLETED
        returned.return_value = failure if is_failed else self.row.trial and self.row.trial.final
        return returned


class _Run:
    """The trials of one call of the launcher, on one cluster of Ray."""

    def __init__(self, folder: Path, trials: list[_Trial], options: TrialOptions) -> None:
        self._folder, self._trials, self._options = folder, trials, options

    def run(self) -> None:
        """Run what has not ended.

        Raises:
            KeyboardInterrupt: it was interrupted; trials that ran have saved themselves.
            StopRequested: it was asked to stop; so have they.
        """
        waiting = [trial for trial in self._trials if not trial.is_over]
        rows = [trial.row for trial in self._trials]
        if not waiting:
            return
        # Here, because it imports torch.
        from torchrl_grpo.rollout.workers.ray_pool import local_cluster

        with (
            remember_interrupts() as check_interrupts,
            local_cluster(allowed_cores(), range(self._options.num_gpus)),
            StateTable() as table,
        ):
            refs = {self._start(trial): trial for trial in waiting}
            try:
                while refs:
                    self._wait(refs)
                    self._end_hopeless(waiting)
                    table.show(rows)
                    if stop_requested():
                        raise StopRequested
            except (KeyboardInterrupt, StopRequested) as interrupt:
                number = STOP_SIGNAL if isinstance(interrupt, StopRequested) else signal.SIGTERM
                for trial in refs.values():
                    self._stop(trial, number)
                running = {ref: trial for ref, trial in refs.items() if trial.row.state != WAITING}
                while running:
                    self._wait(running)
                sys.stdout.write(f"The sweep goes on with the same command and sweep.resume={self._folder}\n")
                # Ray raises KeyboardInterrupt for SIGTERM too.
                check_interrupts()
                raise

    def _start(self, trial: _Trial) -> Any:
        import ray

        count, on_gpu = self._options.devices, self._options.num_gpus > 0
        resources = {"num_gpus": count, "num_cpus": 0} if on_gpu else {"num_cpus": count}
        # A second thread takes the call of stop().
        actor = ray.remote(TrialProcess).options(max_concurrency=2, **resources)
        trial.actor = actor.remote(str(self._folder), trial.row.name, None if on_gpu else count)
        trial.placed = trial.actor.placed.remote()
        return trial.actor.run.remote(trial.command, own_variables.inherited(), os.getcwd())

    def _stop(self, trial: _Trial, number: int) -> None:
        import ray

        if trial.row.state == WAITING:
            ray.kill(trial.actor)
        else:
            trial.stop(number)

    def _wait(self, refs: dict[Any, _Trial]) -> None:
        """Wait a little, and take away the trials that have ended."""
        import ray
        from ray.exceptions import RayError

        ended, _ = ray.wait(list(refs), num_returns=1, timeout=_LOOK_S)
        for ref in ended:
            trial = refs.pop(ref)
            try:
                trial.end(ray.get(ref))
            except RayError:
                # The actor's process was killed, as the system does when memory runs out.
                trial.end(-signal.SIGKILL)
            ray.kill(trial.actor)
        for trial in refs.values():
            if trial.row.state == WAITING and ray.wait([trial.placed], timeout=0)[0]:
                trial.row.state = RUNNING
            trial.read()

    def _end_hopeless(self, waiting: Sequence[_Trial]) -> None:
        evaluations = self._options.hopeless_after
        if evaluations is None:
            return
        read = [trial.row.trial for trial in self._trials if trial.row.trial is not None]
        lost = hopeless(read, evaluations)
        for trial in waiting:
            if trial.row.state == RUNNING and any(trial.row.trial is each for each in lost):
                trial.stop_early(evaluations)
                trial.row.state = STOPPED_EARLY


def _failure(folder: Path, trials: Sequence[_Trial]) -> UserError | None:
    """Return the error for the trials that have failed; None if none has."""
    failed = [trial for trial in trials if trial.row.state == FAILED]
    if not failed:
        return None
    first = failed[0]
    log = folder / f"{first.row.name}.log"
    names = ", ".join(trial.row.name for trial in failed)
    return ConfigError(
        f"{len(failed)} of {len(trials)} trials failed ({names}); trial {first.row.name} ended with code "
        f"{first.code}{_last_words(log)}; see {log}, repair that, and write sweep.resume={folder} with the "
        "same command"
    )


def _last_words(log: Path) -> str:
    """Return the last line of a log that says what went wrong; the last one if none does."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL))
        text = file.read().decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"error: |\w*(Error|Exception)\b", line)]
    last = (errors or lines)[-1:]
    return f" ({last[0][:300]})" if last else ""
