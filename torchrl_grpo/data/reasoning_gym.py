"""Procedurally generated tasks of ``reasoning_gym``, each with its own scorer.

Training problems are generated on demand, because some tasks take 0.07 s per question. A problem depends only
on the seed and its index, so the order of access and resumption do not change it. Held-out problems come from
a separate seed that no run trains on. A training problem that is also held out, in whatever words, is
replaced by another one (:mod:`~torchrl_grpo.data.gym_identity`).
"""

from __future__ import annotations

import difflib
import logging
from collections import Counter
from collections.abc import Set
from dataclasses import replace
from operator import itemgetter
from typing import Any

from torchrl_grpo.config import Config
from torchrl_grpo.config.derived import held_out_problems
from torchrl_grpo.config.schema import EnvConfig
from torchrl_grpo.data import problems, prompts
from torchrl_grpo.data.example import Example, LazyExamples
from torchrl_grpo.data.gym_identity import identity
from torchrl_grpo.data.identity import group_key, keys, question_key
from torchrl_grpo.data.rows import codec, columns, sources
from torchrl_grpo.errors import ConfigError, DataError

_log = logging.getLogger(__name__)

#: ``reasoning_gym`` draws question i from seed + i. Training seeds start below 2**31, held-out seeds above.
_HELD_OUT_SEED = 2**31 + problems.HELD_OUT_SEED
#: Attempts to draw a training problem that is not held out before the task counts as too small.
_MAX_DRAWS = 1_000


def load(cfg: Config) -> problems.Problems:
    """Load the training problems (generated on demand) and the held-out problems of ``env.task``.

    Raises:
        ConfigError: ``env.task`` or ``env.task_args`` is wrong.
        DataError: the task has too few different questions for ``eval.num_problems``.
    """
    env = cfg.env
    task, args = check(env)
    held_out, notes = _held_out(env, task, args, held_out_problems(cfg))
    seed = cfg.seed * 1_000_003 % 2**31
    train = Generated(env, task, args, seed, {key for problem in held_out for key in keys(problem)})
    train[0]  # fail now, and not in the middle of a run, if every problem of the task is held out
    return problems.Problems(train=train, held_out=held_out, notes=notes)


def example(row: sources.Row, env: EnvConfig, id: str) -> Example:
    """Convert a row to an example; ``truth`` is ``{"task", "args", "entry"}`` for the task's scorer.

    Args:
        row: entry of the task with ``question``, ``answer`` and ``metadata``.
        env: configuration; ``task`` and ``task_args`` name the scorer.
        id: the example's id.

    Raises:
        ConfigError: ``env.task`` or ``env.task_args`` is wrong.
        DataError: the entry has no question.
    """
    task, args = check(env)
    return _example(env, task, args, row, id)


def check(env: EnvConfig) -> tuple[str, dict[str, Any]]:
    """Check the task and return its name and arguments.

    Raises:
        ConfigError: the task is unknown, ``task_size`` is not positive, or an argument is unknown to the
            task or has an invalid value.
    """
    if env.task is None:
        raise ConfigError("env.dataset=reasoning_gym needs a task: set env.task, e.g. env.task=chain_sum")
    names = task_names()
    if env.task not in names:
        near = difflib.get_close_matches(env.task, names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"write one of: {', '.join(names)}"
        raise ConfigError(f"env.task={env.task!r} is not one of reasoning_gym's {len(names)} tasks; {hint}")
    reserved = {"seed": "seed", "size": "env.task_size"}
    for name, key in reserved.items():
        if name in env.task_args:
            raise ConfigError(
                f"env.task_args.{name}={env.task_args[name]!r}: the key {key} sets this argument; remove it "
                f"and set {key}"
            )
    if env.task_size < 1:
        raise ConfigError(f"env.task_size={env.task_size} leaves no problem to train on; write 1 or more")
    make(env.task, env.task_args, seed=0, size=1)
    return env.task, env.task_args


def task_names() -> list[str]:
    """Return the names of all tasks, sorted."""
    from torchrl_grpo.data.gym_library import reasoning_gym

    return sorted(reasoning_gym.factory.DATASETS)


def make(task: str, args: dict[str, Any], seed: int, size: int) -> Any:
    """Create the task's data set.

    Args:
        task: one of :func:`task_names`.
        args: the task's own arguments.
        seed: seed of the data set; question i is drawn from ``seed + i``.
        size: number of questions.

    Returns:
        A ``reasoning_gym`` ``ProceduralDataset``.

    Raises:
        ConfigError: the task rejects the arguments.
    """
    import dataclasses

    from torchrl_grpo.data.gym_library import reasoning_gym

    arguments = dict(args)
    try:
        if task == "composite" and "datasets" in arguments:
            arguments["datasets"] = [
                reasoning_gym.composite.DatasetSpec(**({"config": {}, "weight": 1.0} | spec))
                for spec in arguments["datasets"]
            ]
        return reasoning_gym.create_dataset(task, seed=seed, size=size, **arguments)
    except (TypeError, ValueError, AssertionError) as error:
        known = [
            f.name
            for f in dataclasses.fields(reasoning_gym.factory.DATASETS[task][1])
            if f.name not in ("seed", "size")
        ]
        raise ConfigError(
            f"env.task={task} rejects env.task_args={args!r}: {error}; its arguments are: {', '.join(known)}"
        ) from error


class Generated(LazyExamples):
    """``env.task_size`` training problems, each generated on access.

    Args:
        env: configuration; ``task_size`` and the prompt keys are read.
        task: the task's name.
        args: the task's arguments.
        seed: seed of the questions.
        held_out: keys (:func:`~torchrl_grpo.data.identity.keys`) of problems that must not appear.
    """

    def __init__(
        self, env: EnvConfig, task: str, args: dict[str, Any], seed: int, held_out: Set[str]
    ) -> None:
        self._env, self._task, self._args = env, task, args
        self._seed, self._held_out = seed, held_out
        self._draws: dict[int, Any] = {}  # draw number -> data set; draw 0 serves nearly every index
        self._replaced: dict[int, bool] = {}

    def __len__(self) -> int:
        return self._env.task_size

    def without(self, keys: Set[str]) -> Generated:
        return Generated(self._env, self._task, self._args, self._seed, self._held_out | keys)

    def example_at(self, index: int) -> Example:
        """See :class:`~torchrl_grpo.data.example.LazyExamples`.

        Raises:
            DataError: the task has too few problems that are not held out.
        """
        for draw in range(_MAX_DRAWS):
            row = sources.Row(self._draw(draw)[index], index + 1, f"{self._task} (training)")
            problem = _generated(self._env, self._task, self._args, row, f"reasoning_gym/train/{index + 1}")
            if keys(problem).isdisjoint(self._held_out):
                return problem
            self._note_replaced(index, question_key(problem) in self._held_out)
        raise DataError(
            f"env.task={self._task}: all of {_MAX_DRAWS} drawn questions are among the held-out problems, so "
            "the task has too few different ones; lower eval.num_problems or widen env.task_args"
        )

    def _note_replaced(self, index: int, same_question: bool) -> None:
        """Log the 1st, 10th, 100th and so on training problem that is held out."""
        if index in self._replaced:
            return
        self._replaced[index] = same_question
        number, same = len(self._replaced), sum(self._replaced.values())
        if str(number).strip("0") == "1":
            _log.info(
                "env.task=%s: of the training problems so far, %d were held out, and others were drawn in "
                "their place: %d with the same question, %d in other words",
                self._task,
                number,
                same,
                number - same,
            )

    def _draw(self, draw: int) -> Any:
        if draw not in self._draws:
            seed = (self._seed + draw * len(self)) % 2**31
            self._draws[draw] = make(self._task, self._args, seed, len(self))
        return self._draws[draw]


def _held_out(env: EnvConfig, task: str, args: dict[str, Any], count: int) -> tuple[list[Example], list[str]]:
    """Generate at most ``count`` different questions from the held-out seed, and notes about them.

    A task may word few problems in many ways. All wordings of a problem are held out together, and at least
    half of the problems that were found remain to train on.

    Raises:
        DataError: the task has a single problem.
    """
    if count == 0:
        return [], []
    limit = 20 * count
    entries = make(task, args, _HELD_OUT_SEED, limit)
    groups: dict[str, dict[str, tuple[int, Example]]] = {}
    draws: Counter[str] = Counter()
    is_large = False
    for index in range(limit):
        row = sources.Row(entries[index], index + 1, f"{task} (held out)")
        new = _generated(env, task, args, row, f"reasoning_gym/test/{index + 1}")
        groups.setdefault(group_key(new), {}).setdefault(question_key(new), (index, new))
        draws[group_key(new)] += 1
        # Of fewer than 2 * count problems, more than a fifth of such draws would be repetitions.
        few_repetitions = count >= 20 and len(groups) == count and index < 1.25 * count
        is_large = few_repetitions or len(groups) == 2 * count
        half = list(groups)[: len(groups) // 2]
        # More draws would find more wordings, which takes minutes for some tasks.
        if is_large or sum(len(groups[name]) for name in half) >= 2 * count:
            break
    if len(groups) == 1:
        raise DataError(
            f"env.task={task}: {limit} drawn questions are all the same problem, so "
            f"eval.num_problems={count} leaves nothing to train on; widen env.task_args, or set "
            "eval.num_problems=0"
        )
    chosen: list[tuple[int, Example]] = []
    names: list[str] = []
    for name in list(groups)[:count] if is_large else half:
        if len(chosen) < count:
            chosen += groups[name].values()
            names.append(name)
    held_out = [example for _, example in sorted(chosen, key=itemgetter(0))[:count]]
    if is_large:
        return held_out, []
    share = sum(draws[name] for name in names) / draws.total()
    note = (
        f"env.task={task} has few different problems: {len(groups)} were found. {len(names)} of them are "
        f"held out, in {len(held_out)} questions. Training draws others in their place, for {share:.0%} of "
        "what the task generates"
    )
    if len(held_out) < count:
        note += (
            f". eval.num_problems={count} would leave fewer than half of them to train on; widen "
            "env.task_args for more"
        )
    return held_out, [note]


def _generated(env: EnvConfig, task: str, args: dict[str, Any], row: sources.Row, id: str) -> Example:
    return replace(_example(env, task, args, row, id), identity=identity(task, row.values))


def _example(env: EnvConfig, task: str, args: dict[str, Any], row: sources.Row, id: str) -> Example:
    question = columns.text(row, "question", "reasoning_gym")
    entry = codec.encode(row.values)
    truth = {"task": task, "args": args, "entry": entry}
    metadata = row.values.get("metadata")
    # Rows of stored completions may have anything there.
    expression = metadata.get("expression", "") if isinstance(metadata, dict) else ""
    answer = row.values.get("answer")
    solution = "" if answer is None else prompts.solution(env, str(expression), str(answer))
    trusted = prompts.trusted(env, "reasoning_gym")
    turns = prompts.messages(env, "reasoning_gym", question)
    return Example(id, turns, truth, solution=solution, question=question, trusted=trusted)
