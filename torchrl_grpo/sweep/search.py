"""A sweeper of Hydra in which Optuna chooses the settings, by its interface of asking and telling.

Seeds stay an axis: each setting runs with all of them, and its value is their mean. Optuna's own plugin for
Hydra asks for a version of Optuna that is four years old.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from omegaconf import OmegaConf

from torchrl_grpo.config.schema import keys
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.observe.metrics import METRICS
from torchrl_grpo.sweep import plugins
from torchrl_grpo.sweep.trials import read_trial, recorded_overrides

if TYPE_CHECKING:
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig
    from optuna.distributions import BaseDistribution
    from optuna.trial import Trial

_SEED = "seed"


def use(count: int, at_once: int) -> str:
    """Register the sweeper, and return the override that chooses it.

    Args:
        count: number of settings to try.
        at_once: number of trials that run at the same time.

    Raises:
        ConfigError: Optuna is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise ConfigError(
            f"sweep.trials={count}: it needs the package optuna ({error}); install it, or write "
            "sweep.trials=null for every combination of the values"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    SearchSweeper.count, SearchSweeper.at_once = count, at_once
    return plugins.register("sweeper", "search", SearchSweeper)


class SearchSweeper(Sweeper):
    """The sweeper. Hydra makes it, so :func:`use` sets its options on the class."""

    __module__ = plugins.MODULE
    count: int
    at_once: int

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config
        self._launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> list[JobReturn]:
        """Ask for settings, run them, and tell their values, until so many have been tried."""
        import optuna

        assert self.config is not None and self.hydra_context is not None
        folder = Path(str(self.config.hydra.sweep.dir))
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, folder / "multirun.yaml")
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        space = Space(parser.parse_overrides(arguments))
        study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
        returns: list[JobReturn] = []
        size = max(1, self.at_once // len(space.seeds))
        for start in range(0, self.count, size):
            suggested = []
            for number in range(min(size, self.count - start)):
                before = space.recorded(folder / str(len(returns) + number * len(space.seeds)))
                if before is not None:
                    study.enqueue_trial(before)
                suggested.append(study.ask(space.distributions))
            jobs = [job for each in suggested for job in space.jobs(each)]
            self.validate_batch_is_legal(jobs)
            ended = self._launcher.launch(jobs, initial_job_idx=len(returns))
            for number, each in enumerate(suggested):
                first = number * len(space.seeds)
                self._tell(study, each, folder, len(returns) + first, ended[first : first + len(space.seeds)])
            returns += ended
        for returned in returns:
            # The first error of a trial is raised here.
            _ = returned.return_value
        return returns

    def _tell(self, study: Any, trial: Trial, folder: Path, first: int, ended: Sequence[JobReturn]) -> None:
        import optuna

        trials = [folder / str(first + at) for at in range(len(ended))]
        read = [read_trial(path, with_grades=False) for path in trials if (path / METRICS).is_file()]
        values = [each.final for each in read if each.final is not None]
        failed = len(values) < len(ended) or any(each.status == JobStatus.FAILED for each in ended)
        if failed:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(trial, sum(values) / len(values))


class Space:
    """The settings among which Optuna chooses.

    Args:
        overrides: overrides of the command line.

    Attributes:
        distributions: distribution of each key that varies.
        seeds: overrides of the seeds; a single one without any if there is no axis of them.
    """

    def __init__(self, overrides: Sequence[Override]) -> None:
        self._fixed: list[str] = []
        self.seeds: list[list[str]] = [[]]
        self.distributions: dict[str, BaseDistribution] = {}
        for override in overrides:
            key = override.get_key_element()
            if not override.is_sweep_override():
                self._fixed.append(f"{key}={override.get_value_element_as_str()}")
            elif key == _SEED:
                self.seeds = [[f"{key}={value}"] for value in override.sweep_string_iterator()]
            else:
                self.distributions[key] = _distribution(key, override)

    def jobs(self, chosen: Trial) -> list[list[str]]:
        """Return the overrides of the trials of a setting, one for each seed."""
        words = [
            f"{key}={value if isinstance(value, str) else repr(value)}"
            for key, value in chosen.params.items()
        ]
        return [[*self._fixed, *words, *seed] for seed in self.seeds]

    def recorded(self, folder: Path) -> dict[str, Any] | None:
        """Return the setting of a trial of a sweep that goes on; None if it has not begun."""
        words = dict(word.partition("=")[::2] for word in recorded_overrides(folder) or ())
        types = {"FloatDistribution": float, "IntDistribution": int}
        try:
            return {
                key: types.get(type(each).__name__, str)(words[key])
                for key, each in self.distributions.items()
            }
        except (KeyError, ValueError):
            # The record is missing or damaged, or of another search, which the launcher refuses.
            return None


def _distribution(key: str, override: Override) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value = override.value()
    if not isinstance(value, IntervalSweep):
        return CategoricalDistribution([str(each) for each in override.sweep_string_iterator()])
    assert value.start is not None and value.end is not None
    hint, is_log = keys().leaves.get(key), "log" in value.tags
    if int in (hint, *get_args(hint)):
        return IntDistribution(math.ceil(value.start), math.floor(value.end), log=is_log)
    return FloatDistribution(value.start, value.end, log=is_log)
