"""A run from Python: the same configuration, checks and run folder as those of the commands."""

from __future__ import annotations

import inspect
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

from torchrl_grpo.api import arguments, objects
from torchrl_grpo.api.launched import on_all_ranks, told_once, warn
from torchrl_grpo.api.rows import (
    REWARD,
    PassedDataset,
    PassedReward,
    Rows,
    check_rows,
    rewards_itself,
)
from torchrl_grpo.checkpoints import run_dir as run_folder
from torchrl_grpo.cli.checked_job import resolve_job, write_notes
from torchrl_grpo.cli.compose import Composer, composer, write_override
from torchrl_grpo.cli.main import Command
from torchrl_grpo.config import Config
from torchrl_grpo.config.builtin import DATASETS, REWARDS
from torchrl_grpo.config.checks import check_installed
from torchrl_grpo.config.values import TrainMethod
from torchrl_grpo.distributed import launch
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.planning import automatic
from torchrl_grpo.planning.advice import Changes
from torchrl_grpo.runtime import hardware, rank_env, screen
from torchrl_grpo.runtime.config_dir import config_dir

if TYPE_CHECKING:
    from collections.abc import Iterator

# Keys that belong to the command line -> what takes their place here.
_NOT_KEYS = {"hydra": "output_dir", "resume": "train(resume=True)", "dry_run": "grpo.py dry_run=true"}
# A function or class, or how the configuration names one: FILE.py:NAME, or the name of a built-in one.
Named = Callable[..., Any] | str


class GRPOTrainer:
    """Trains a language model with GRPO; with a configuration for ``sft.py``, on solutions.

    Functions and classes may be defined anywhere, in a notebook too. They are sent to the processes that call
    them, so they must not hold open files or connections.

    A launcher (``torchrun``, ``accelerate launch``) may start the script as several processes, the training
    ranks. Each of them must make the same trainer and call the same methods. They return the same everywhere.

    Attributes:
        cfg: configuration of the run.
        output_dir: folder of the run. Ranks other than the first know it after a run, unless it was given.

    Args:
        model: hub name or folder; None takes that of the configuration.
        train_dataset: problems: a list of mappings, a Hugging Face data set, an object with ``__len__`` and
            ``__getitem__``, or a stream: an iterable that begins anew each time. The prompt is the column
            ``question``, ``prompt`` or ``messages``, and the answer the column ``answer``; ``env.fields``
            names others. If the data set has ``get_reward(index, completion)``, or its rows
            ``get_reward(completion)``, that is the reward ``get_reward``. None takes the data set of the
            configuration.
        eval_dataset: held-out problems; None takes some of ``train_dataset``. They are graded by their own
            ``get_reward`` if they have it, unless ``eval.reward`` names another reward.
        rewards: reward functions, or names of built-in rewards. They are added to ``get_reward``. Each has
            weight 1, unless ``reward.weights`` gives others. See ``docs/tasks_and_rewards.md`` for the
            signatures.
        tools: functions that the model may call, or names of built-in tools.
        environment: class of an environment of several turns, or the name of a built-in one.
        config: keys and values, such as ``{"optimizer.lr": 2e-5}``. They win over the other arguments.
        config_name: primary configuration to start from.
        output_dir: folder of the run; None takes one below ``outputs`` that is named after the time.
        asynchronous: whether to sample and train at the same time, as ``grpo-async.py`` does.
        unknown: no other argument exists; the error says what those of other systems are called here.

    Raises:
        UserError: a value is wrong; the message names it and a fix.
        SystemExit: the same, under a launcher: the message is printed once.
    """

    def __init__(
        self,
        model: str | None = None,
        train_dataset: Rows | None = None,
        eval_dataset: Rows | None = None,
        rewards: Sequence[Named] | Named | None = None,
        tools: Sequence[Named] | Named = (),
        environment: Named | None = None,
        config: Mapping[str, Any] | None = None,
        *,
        config_name: str = "grpo_gsm8k",
        output_dir: str | Path | None = None,
        asynchronous: bool = False,
        **unknown: Never,
    ) -> None:
        self._asynchronous = asynchronous
        with told_once():
            if unknown:
                raise arguments.unknown_arguments_error(
                    unknown, list(inspect.signature(GRPOTrainer).parameters)[:-1]
                )
            values: dict[str, Any] = {} if model is None else {"model.name": _model_name(model)}
            passed: dict[str, Any] = {}
            if config is not None and not isinstance(config, Mapping):
                raise ConfigError(
                    f"config is {type(config).__name__}, not a mapping of keys to values; write e.g. "
                    'config={"optimizer.lr": 2e-5}'
                )
            grader = (config or {}).get("eval.reward", REWARD)
            values |= _of_data(train_dataset, eval_dataset, rewards, environment, passed, grader)
            if chosen := _listed(tools, "tools"):
                values["env.tools"] = list(_by_name(chosen, passed, "tools").values())
            if environment is not None:
                (values["env.environment"],) = _by_name([environment], passed, "environment").values()
            for key in config or ():
                if (instead := _NOT_KEYS.get(key.partition(".")[0])) is not None:
                    raise ConfigError(f"config has {key!r}; write {instead} instead")
            self._create(passed, {**values, **(config or {})}, config_name, output_dir)
            warn()

    def _create(
        self, passed: Mapping[str, Any], values: Mapping[str, Any], name: str, output_dir: str | Path | None
    ) -> None:
        with composer(config_dir(), name) as tree:
            # The folder is needed before the objects can be named. Rank 0 alone creates it.
            planned = tree.compose([]).run_dir if output_dir is None else Path(output_dir)
            new = output_dir is None and rank_env.rank() == 0
            self.output_dir = (run_folder.new_folder(planned) if new else planned).resolve()
            try:
                self._objects = objects.PassedObjects(passed, self.output_dir)
                self.cfg: Config = self._configure(tree, values)
            except BaseException:
                if new:
                    run_folder.remove_if_unused(self.output_dir)
                raise

    def _configure(self, tree: Composer, whole: Mapping[str, Any]) -> Config:
        names = self._objects.names()
        words = [write_override(key, _replaced(value, names)) for key, value in whole.items()]
        (overrides,) = tree.jobs(words, sweep=False)

        def check(cfg: Config) -> None:
            # Workers have nothing to do for solutions.
            method = TrainMethod.grpo if self._asynchronous else cfg.train.method
            Command(asynchronous=self._asynchronous, method=method).check(cfg)

        job = tree.compose(overrides)
        cfg = resolve_job(job.node, check)
        # Ranks may have to hold shards. A script is one process without a launcher, so nothing is chosen.
        changes: Changes = ()
        if rank_env.launched():
            changes = automatic.choose([cfg], self._asynchronous, hardware.present()).changes
        if changes:
            job = tree.compose([*overrides, *automatic.overrides(changes)])
            cfg = resolve_job(job.node, check)
        if rank_env.rank() == 0:
            sys.stdout.write(automatic.written(changes))
        write_notes(job)
        check_installed(cfg)
        if not rank_env.launched() and (count := launch.ranks_wanted([cfg])) > 1:
            raise ConfigError(
                f"train_model.num_devices={count}: a script is one process, unless a launcher starts it; "
                f"start it with torchrun --nproc-per-node {count} SCRIPT.py, or with accelerate launch "
                f"--multi_gpu --num_processes {count} SCRIPT.py"
            )
        return cfg

    def train(self, resume: bool = False) -> dict[str, Any]:
        """Train, and write the run folder.

        Args:
            resume: whether to continue from the newest checkpoint of ``output_dir``. The functions and rows
                that were passed to this trainer take the place of earlier ones.

        Returns:
            The contents of ``summary.json``.

        Raises:
            UserError: the data, checkpoint, model or training is invalid; the message names the fix.
        """
        with told_once():
            summary, self.output_dir = on_all_ranks(lambda: self._train(resume))
        return summary

    def _train(self, resume: bool) -> tuple[dict[str, Any], Path]:
        from torchrl_grpo.training import job

        cfg = self.cfg
        if resume:
            run_folder.folder_to_resume(str(self.output_dir), None)
            cfg = replace(cfg, resume=str(self.output_dir))
        elif run_folder.holds_run(self.output_dir):
            raise ConfigError(
                f"output_dir={self.output_dir}: it holds an earlier run, which is left as it is; call "
                "train(resume=True) to continue it, or give another output_dir"
            )
        with self._ready():
            run = job.run_async if self._asynchronous else job.run
            return run(cfg, self.output_dir), self.output_dir

    def evaluate(self) -> dict[str, float]:
        """Measure the held-out accuracy or reward of the newest checkpoint, or of the model before training.

        Returns:
            The metrics ``eval/*``.

        Raises:
            UserError: the data, checkpoint or model is invalid, or no problem is held out.
        """
        with told_once():
            metrics, self.output_dir = on_all_ranks(self._evaluate)
        return metrics

    def _evaluate(self) -> tuple[dict[str, float], Path]:
        from torchrl_grpo.training import job

        with self._ready():
            return job.evaluate(self.cfg, self._newest()), self.output_dir

    def save(self, folder: str | Path) -> Path:
        """Copy the model of the newest checkpoint, in the format of ``from_pretrained``.

        Args:
            folder: folder to write. With adapters it has the adapters alone.

        Returns:
            The folder. Under a launcher rank 0 alone writes it, and the others do not wait for it.

        Raises:
            ConfigError: there is no checkpoint yet, or the folder exists.
        """
        if rank_env.rank() > 0:
            return Path(folder)
        with told_once():
            return self._copied(Path(folder))

    def _copied(self, target: Path) -> Path:
        newest = self._newest()
        if newest is None:
            raise ConfigError(f"{self.output_dir} has no checkpoint to save; call train() first")
        if target.exists():
            raise ConfigError(f"{target}: it exists already; name another folder")
        # Others who wait for the folder see all of it or nothing.
        partial = target.with_name(f".{target.name}.writing")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(newest / "model", partial)
        return partial.rename(target)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of the run so far: one mapping for each line of ``metrics.jsonl``."""
        path = self.output_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @contextmanager
    def _ready(self) -> Iterator[None]:
        """Write what the processes of a run read, and log to ``python.log``."""
        self.output_dir.mkdir(parents=True, exist_ok=True)
        self._objects.write()
        with screen.log_to_file(self.output_dir / "python.log"):
            yield

    def _newest(self) -> Path | None:
        complete = run_folder.complete_checkpoints(self.output_dir)
        return complete[-1] if complete else None


class _Passed(str):
    """Name of an object that was passed, until its place in a file is known."""


def _of_data(
    train_dataset: Rows | None,
    eval_dataset: Rows | None,
    rewards: Sequence[Named] | Named | None,
    environment: Named | None,
    passed: dict[str, Any],
    grader: Any,
) -> dict[str, Any]:
    """Return the keys of data sets and rewards, and add Python objects to ``passed``.

    Held-out rows are asked for their own reward only if ``grader``, the value of ``eval.reward``, names it.
    """
    values: dict[str, Any] = {}
    chosen = _listed(rewards, "rewards")
    usual = {"environment": 1.0} if environment is not None else DATASETS["jsonl"].weights
    own: list[Named] = []
    rewarded = graded = False
    if train_dataset is not None:
        check_rows(train_dataset, "train_dataset")
        if eval_dataset is not None:
            check_rows(eval_dataset, "eval_dataset")
        passed["train_dataset"] = dataset = PassedDataset(train_dataset, eval_dataset)
        values |= {
            "env": "jsonl",
            "env.dataset": _Passed("train_dataset"),
        }
        rewarded = rewards_itself(train_dataset)
        graded = grader == REWARD and (rewarded if eval_dataset is None else rewards_itself(eval_dataset))
        own = [PassedReward(dataset)] if rewarded or graded else []
    elif eval_dataset is not None:
        raise ConfigError("eval_dataset is given without train_dataset; give both, or name them in config")
    functions = _by_name([*own, *chosen], passed, "rewards", REWARDS)
    if functions:
        values["reward.functions"] = {
            name: spec for name, spec in functions.items() if isinstance(spec, _Passed) or ":" in spec
        }
        weighted = [name for name in functions if rewarded or name != REWARD]
        values["reward.weights"] = dict.fromkeys(weighted, 1.0) or dict(usual)
    if graded:
        values["eval.reward"] = REWARD
    elif rewarded:
        # Held-out rows do not have it.
        values["eval.reward"] = next((n for n in functions if n != REWARD), next(iter(usual)))
    return values


def _listed(value: Any, name: str) -> list[Any]:
    """Return what was passed as a list; one function or name stands for itself."""
    if callable(value) or isinstance(value, str):
        return [value]
    if value is not None and not isinstance(value, Iterable):
        raise ConfigError(
            f"{name} is {type(value).__name__} {value!r:.60}; give functions, or names, in a list"
        )
    return list(value or ())


def _model_name(model: Any) -> str:
    if isinstance(model, str | Path):
        return str(model)
    raise ConfigError(
        f"model is {type(model).__name__}, not a name; write the name of a model on the hub or a folder, for "
        "example one that save_pretrained() has written"
    )


def _by_name(
    chosen: Sequence[Named], passed: dict[str, Any], what: str, built_in: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Return the chosen functions or classes by name, and add those that are Python objects to ``passed``.

    Raises:
        ConfigError: one cannot be called, or two have the same name.
    """
    named: dict[str, str] = {}
    for choice in chosen:
        is_name = isinstance(choice, str)
        if not is_name and not callable(choice):
            raise ConfigError(f"{what} has {choice!r:.80}, which cannot be called; give functions or classes")
        name = choice.rpartition(":")[2] if isinstance(choice, str) else objects.label(choice)
        # Its own name would stand for the built-in reward, or cannot be written in a configuration.
        if not is_name and (name in (built_in or ()) or not name.isidentifier()):
            name = f"my_{name}" if f"my_{name}".isidentifier() else f"my_function_{len(named)}"
        if name in named or (not is_name and name in passed):
            raise ConfigError(f"{what} has two functions {name!r}; rename one")
        named[name] = choice if isinstance(choice, str) else _Passed(name)
        if not isinstance(choice, str):
            passed[name] = choice
    return named


def _replaced(value: Any, names: Mapping[str, str]) -> Any:
    """Return ``value`` with each passed object's name replaced by what the configuration calls it."""
    if isinstance(value, _Passed):
        return names[value]
    if isinstance(value, Mapping):
        return {key: _replaced(item, names) for key, item in value.items()}
    return [_replaced(item, names) for item in value] if isinstance(value, list) else value
