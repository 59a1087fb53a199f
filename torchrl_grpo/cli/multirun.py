"""What ``--multirun`` has beyond single runs: seeds as an axis, and trials on free devices."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from torchrl_grpo.config.keys import bad_value
from torchrl_grpo.config.schema import SweepConfig
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.planning.cores import allowed_cores, visible_gpus
from torchrl_grpo.runtime import hardware, own_variables, rank_env

# Hydra's settings that are of the sweep, or that each trial gets a value of its own for.
_OF_SWEEP = (
    *("hydra.sweep", "hydra.launcher", "hydra/sweeper", "hydra/launcher"),
    *("hydra.mode", "hydra.run.dir", "hydra.job.name"),
)
# Written by Hydra's sweepers into the folder of a sweep.
_RECORD = "multirun.yaml"


def refuse_options(words: Sequence[str]) -> None:
    """Refuse options of a sweep for a single run.

    Raises:
        ConfigError: there is one.
    """
    for word in words:
        if _is_option(word):
            raise ConfigError(f"{word}: only a sweep reads it; write --multirun {word} instead")


def without_options(words: Sequence[str], options: SweepConfig) -> list[str]:
    """Return overrides without the options of the sweep, and with the seeds that they stand for.

    Raises:
        ConfigError: seeds are given twice.
    """
    own = [word for word in words if not _is_option(word)]
    if options.seeds is None:
        return own
    if any(word.startswith("seed=") for word in own):
        raise bad_value("sweep.seeds", options.seeds, "seed is set too", "one of the two")
    return [*own, f"seed={','.join(map(str, range(options.seeds)))}"]


def _is_option(word: str) -> bool:
    return word.lstrip("+").startswith(("sweep.", "sweep="))


def folder_to_resume(resume: str, chosen: Path | None) -> Path:
    """Return the folder of the sweep that goes on.

    Args:
        resume: the folder.
        chosen: folder that ``hydra.sweep.dir`` names; None if it names none.

    Raises:
        ConfigError: it is no folder of a sweep, or not the chosen one.
    """
    folder = Path(resume)
    if chosen is not None and chosen.resolve() != folder.resolve():
        raise bad_value(
            "hydra.sweep.dir", chosen, f"sweep.resume={resume} goes on in its folder", "sweep.resume alone"
        )
    if not (folder / _RECORD).is_file():
        raise bad_value(
            "sweep.resume",
            resume,
            f"there is no {_RECORD}, so it is no folder of a sweep",
            "a folder such as multirun/2026-01-31/10-30-00, or sweep.resume=null for a new sweep",
        )
    return folder


@dataclass(frozen=True)
class Trials:
    """Trials in processes of their own.

    Attributes:
        devices: number of devices of each.
        num_gpus: GPUs of this machine; with none, devices are CPU cores.
        hopeless_after: value of ``sweep.hopeless_after``.
    """

    devices: int
    num_gpus: int
    hopeless_after: int | None

    @property
    def at_once(self) -> int:
        """Number of trials that run at the same time."""
        return (self.num_gpus or allowed_cores()) // self.devices

    @classmethod
    def of(cls, options: SweepConfig) -> Trials | None:
        """Return what the options ask for; None if trials run in this process.

        Raises:
            ConfigError: a trial fits nowhere.
        """
        if options.devices is None:
            return None
        if rank_env.launched():
            raise bad_value(
                "sweep.devices",
                options.devices,
                "a launcher has started this command in several ranks, and each trial starts its own",
                "the command without the launcher",
            )
        num_gpus = len(hardware.present().gpus)
        total, kind = (num_gpus, "GPUs") if num_gpus else (allowed_cores(), "CPU cores")
        if options.devices > total:
            raise bad_value(
                "sweep.devices",
                options.devices,
                f"each trial would need so many {kind}, and this machine has {total}",
                f"sweep.devices={total} or less",
            )
        return cls(options.devices, num_gpus, options.hopeless_after)

    def devices_visible(self) -> AbstractContextManager[None]:
        """Let this process see as many GPUs as a trial, to check the plans of the trials."""
        if not self.num_gpus:
            return nullcontext()
        return own_variables.temporary(visible_gpus(range(self.devices)))

    def launcher(self, flags: Sequence[str], words: Sequence[str]) -> str:
        """Prepare Hydra's launcher, and return the override that chooses it.

        Args:
            flags: options of the command line that each trial gets.
            words: overrides of the command line, of which each trial gets those of Hydra.

        Raises:
            ConfigError: another launcher is chosen.
        """
        for word in words:
            if word.startswith("hydra/launcher="):
                raise ConfigError(
                    f"{word}: sweep.devices={self.devices} starts the trials by itself; write one of the two"
                )
        from hydra.core.override_parser.overrides_parser import OverridesParser

        from torchrl_grpo.sweep import launcher

        overrides = OverridesParser.create().parse_overrides(list(words))
        varied = {each.get_key_element() for each in overrides if each.is_sweep_override()}
        hydra = [
            word for word in words if word.startswith(("hydra.", "hydra/")) and not word.startswith(_OF_SWEEP)
        ]
        options = launcher.TrialOptions(
            [*_program(), *flags], hydra, varied, self.devices, self.num_gpus, self.hopeless_after
        )
        return launcher.use(options)


def searcher(count: int, trials: Trials | None, words: Sequence[str]) -> str:
    """Prepare the search, and return the override that chooses it.

    Args:
        count: number of settings to try.
        trials: how trials run; None if one after the other.
        words: overrides of the command line.

    Raises:
        ConfigError: another sweeper is chosen, or Optuna is not installed.
    """
    for word in words:
        if word.startswith("hydra/sweeper="):
            raise ConfigError(f"{word}: sweep.trials={count} is a search of its own; write one of the two")
    from torchrl_grpo.sweep import search

    return search.use(count, 1 if trials is None else trials.at_once)


def _program() -> list[str]:
    """Return the words that started this process, up to the name of the command."""
    words, called = list(sys.orig_argv), sys.argv[0]
    before = words[1 : words.index(called)] if called in words else []
    return [sys.executable, *before, called]
