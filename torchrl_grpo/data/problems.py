"""Split problems into training and held-out ones, none of which are the same.

:mod:`torchrl_grpo.data.identity` says which problems are the same.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace

from torchrl_grpo.config import Config
from torchrl_grpo.config.builtin import dataset_kind
from torchrl_grpo.config.derived import HELD_OUT, held_out_problems
from torchrl_grpo.config.schema import EnvConfig
from torchrl_grpo.data import pictures, prompts
from torchrl_grpo.data.example import Example, LazyExamples
from torchrl_grpo.data.identity import conversation, group_key, keys, question_key
from torchrl_grpo.data.rows.sources import Row, Splits
from torchrl_grpo.data.wording import Frame, frame
from torchrl_grpo.errors import DataError

#: Seed of the choice of held-out rows. It is independent of ``cfg.seed``, so that runs with different seeds
#: are evaluated on the same problems.
HELD_OUT_SEED = 20_231
# A problem with more than this share of the rows has many.
_MANY = 0.02
# Fewest problems that are held out of rows without a test split, if there are twice as many.
_LEAST_HELD_OUT = 8

ToExample = Callable[[Row, EnvConfig, str], Example]


@dataclass
class Problems:
    """The problems of a run.

    Attributes:
        train: training problems in the order of the source.
        held_out: evaluation problems, at most ``eval.num_problems``. None of them is in ``train``, in
            whatever words.
        notes: what the user should know about the choice.
    """

    train: Sequence[Example]
    held_out: list[Example]
    notes: list[str] = field(default_factory=list, kw_only=True)

    def first_examples(self, *, held_out: bool = False) -> dict[str, Example]:
        """Return a problem by the name of its part, which is empty without a mixture.

        Args:
            held_out: whether to return a held-out problem in place of one to train on, if there is one.
        """
        chosen = self.held_out if held_out and self.held_out else self.train
        # Of rows of which only some have an answer, it is one without.
        known = chosen if isinstance(chosen, list) else []
        return {"": next((example for example in known if "answer" not in example.truth), chosen[0])}


def build(cfg: Config, splits: Splits, to_example: ToExample) -> Problems:
    """Turn the rows of a source into problems.

    Args:
        cfg: configuration; ``env`` and ``eval.num_problems`` are read.
        splits: rows of the source. If ``splits.test`` is None, held-out rows are taken from ``splits.train``.
        to_example: function of a row, ``cfg.env`` and the example's id that returns the example.

    Returns:
        The problems. The choice of held-out rows depends on the rows and ``eval.num_problems`` only.

    Raises:
        DataError: a row is malformed, there are no rows, or no training rows are left after holding rows out.
    """
    problems = _split(cfg, splits, to_example)
    return replace(problems, notes=[*splits.notes, *problems.notes])


def _split(cfg: Config, splits: Splits, to_example: ToExample) -> Problems:
    trusted = prompts.trusted(cfg.env, cfg.env.dataset)

    def examples(rows: list[Row], split: str, of_hub: bool) -> list[Example]:
        made = []
        for number, row in enumerate(rows, 1):
            shown: list[pictures.Picture] = []
            if cfg.model.pictures:
                row, shown = pictures.take_out(row, cfg.env.fields, of_hub)
            example = to_example(row, cfg.env, f"{cfg.env.dataset}/{split}/{number}")
            _check_text(example, row)
            if cfg.model.pictures:
                example = pictures.put_in(example, shown, row)
            made.append(replace(example, columns=row.values, trusted=trusted))
        return made

    train = ordered(examples(splits.train, "train", splits.train_of_hub), cfg.env.order_by)
    held_out = None if splits.test is None else examples(splits.test, "test", splits.test_of_hub)
    games = cfg.env.environment is not None
    if games and _start_alike(train, held_out):
        train = [_with_row(example) for example in train]
        held_out = held_out and [_with_row(example) for example in held_out]
    if held_out is None and cfg.eval.num_problems is None and dataset_kind(cfg.env.dataset) == "jsonl":
        return _tenth(train, splits.train_source, games)
    if held_out is None:
        return split_off(train, held_out_problems(cfg), splits.train_source, games=games)
    chosen = choose(held_out, held_out_problems(cfg), games=games)
    return separate(Problems(train, chosen), splits.train_source)


def _tenth(train: list[Example], source: str, games: bool) -> Problems:
    """Hold out a tenth of the questions, as ``eval.num_problems=null`` says."""
    questions = len(_unique(train, games))
    count = max(1, min(HELD_OUT, max(_LEAST_HELD_OUT, questions // 10), questions // 2))
    problems = split_off(train, count, source, games=games)
    note = f"{source}: {count} of {questions} questions are held out; eval.num_problems=N holds out others"
    return replace(problems, notes=[note, *problems.notes])


def _start_alike(train: list[Example], held_out: list[Example] | None) -> bool:
    """Whether the questions of games do not tell training problems from held-out ones."""
    if held_out is None:
        return len(set(map(group_key, train))) == 1
    known = {key for example in held_out for key in keys(example)}
    return not any(keys(example).isdisjoint(known) for example in train)


def _with_row(example: Example) -> Example:
    """Let the whole row say which problem it is: every game may begin with the same words."""
    # GRPOTrainer numbers the rows that it was given in columns with an underscore.
    values = {name: value for name, value in example.columns.items() if not name.startswith("_")}
    row = json.dumps(values | example.truth, sort_keys=True, default=str)
    return replace(example, question=f"{question_key(example)} {row}")


def _check_text(example: Example, row: Row) -> None:
    """Refuse a prompt that no tokenizer takes, such as one with half of an emoji.

    Raises:
        DataError: the prompt is no valid Unicode.
    """
    try:
        for message in example.messages:
            message["content"].encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{row.where}: the prompt has {error.object[error.start]!r} at character {error.start + 1}, "
            "which is half of a character (a lone surrogate); correct the text"
        ) from error


def ordered(examples: list[Example], column: str | None) -> list[Example]:
    """Sort examples by a column, smallest first; keep their order if there is none.

    Raises:
        DataError: an example lacks the column, or its values cannot be compared.
    """
    if column is None:
        return examples
    for example in examples:
        if example.columns.get(column) is None:
            raise DataError(
                f"env.order_by={column!r}: {example.id} has no such column; its columns are "
                f"{', '.join(example.columns) or 'none'}; name one of those that every row has"
            )
    try:
        return sorted(examples, key=lambda example: example.columns[column])
    except TypeError as error:
        raise DataError(
            f"env.order_by={column!r}: its values cannot be compared ({error}); write numbers or texts only"
        ) from error


def choose(examples: list[Example], count: int, *, games: bool = False) -> list[Example]:
    """Choose at most ``count`` different questions, deterministically and in their order.

    Args:
        examples: examples to choose from.
        count: number of them.
        games: whether a question with another ground truth is another one, as it is in a game.
    """
    unique = _unique(examples, games)
    if len(unique) <= count:
        return unique
    chosen = sorted(random.Random(HELD_OUT_SEED).sample(range(len(unique)), count))
    return [unique[i] for i in chosen]


def _unique(examples: list[Example], games: bool) -> list[Example]:
    def key(example: Example) -> tuple[str, str]:
        return question_key(example), str(example.truth) if games and not example.identity else ""

    return list({key(example): example for example in reversed(examples)}.values())[::-1]


def split_off(examples: list[Example], count: int, source: str, *, games: bool = False) -> Problems:
    """Hold out ``count`` questions of a source that has no test split, all wordings of a problem together.

    Raises:
        DataError: the source has too few different problems.
    """
    groups: dict[str, list[int]] = {}
    unique = _unique(examples, games)
    for number, example in enumerate(unique):
        groups.setdefault(group_key(example), []).append(number)
    needed = math.ceil(count * len(groups) / max(1, len(unique)))
    if len(groups) <= needed:
        raise DataError(
            f"{source} has {len(groups)} different questions and no test split; holding out "
            f"eval.num_problems={count} leaves nothing to train on; lower eval.num_problems to at most "
            f"{max(len(groups) - 1, 0)}, or give a second file as env.eval_data_path"
        )
    draw, names = random.Random(HELD_OUT_SEED), list(groups)
    first = draw.sample(range(len(names)), needed)
    # Where groups differ in size, more of them may be needed. One always remains to train on.
    rest = draw.sample([i for i in range(len(names)) if i not in set(first)], len(names) - needed)
    rows = Counter(map(group_key, examples))
    # A problem with many rows is held out only if there is no other: its rows are lost for training.
    many_rows = max(1, _MANY * len(examples))
    order = sorted([*first, *rest], key=lambda i: rows[names[i]] > many_rows)
    chosen: list[int] = []
    for i in order[:-1]:
        if len(chosen) < count:
            chosen += groups[names[i]]
    held_out = [unique[number] for number in sorted(chosen)[:count]]
    ids = {example.id for example in held_out}
    return separate(Problems([example for example in examples if example.id not in ids], held_out), source)


def separate(problems: Problems, source: str) -> Problems:
    """Remove held-out problems from the training problems, which are a list.

    Raises:
        DataError: no training problem is left.
    """
    separated = leave_out(problems, held_out_keys(problems), source)
    if not separated.train:
        raise DataError(
            f"every question of {source} is also held out ({len(problems.train)} rows, "
            f"{len(problems.held_out)} held out), so nothing is left to train on; lower eval.num_problems or "
            "give other held-out data as env.eval_data_path"
        )
    return separated


def held_out_keys(problems: Problems) -> set[str]:
    """Return the keys of the held-out problems."""
    frames = _frames(problems)
    return {key for example in problems.held_out for key in keys(example, frames)}


def _frames(problems: Problems) -> set[Frame]:
    """Return what all training questions begin and end with, and all held-out ones, which may differ."""
    parts = [part for part in (problems.train, problems.held_out) if isinstance(part, list)]
    return {frame([question_key(example) for example in part]) for part in parts}


def leave_out(problems: Problems, held_out: Set[str], source: str) -> Problems:
    """Remove held-out problems from the training problems, and note how many they are, and why.

    Args:
        problems: problems. Generated training problems are replaced by others when they are drawn.
        held_out: keys of held-out problems.
        source: where the problems come from, for the note.
    """
    if isinstance(problems.train, LazyExamples):
        return replace(problems, train=problems.train.without(held_out))
    frames = _frames(problems)
    kept: list[Example] = []
    removed: list[Example] = []
    for example in problems.train:
        (kept if keys(example, frames).isdisjoint(held_out) else removed).append(example)
    if not removed:
        return problems
    left_out = len(removed)
    same = sum(question_key(example) in held_out for example in removed)
    note = (
        f"{source}: {left_out} of {len(problems.train)} training problems are left out, because they are "
        f"held out: {same} with the same question, {left_out - same} in other words"
    )
    if kept and left_out > len(kept):
        note = f"warning: {note}. That is most of them; lower eval.num_problems, or give env.eval_data_path"
    return replace(problems, train=kept, notes=[*problems.notes, note])


def separate_prompts(problems: Problems, source: str) -> Problems:
    """Remove training problems to which an environment gives the prompt of a held-out one.

    If it gives all of them such a prompt, prompts say nothing about problems, and none is removed.

    Args:
        problems: problems with the prompts of their environment; the training problems are a list.
        source: name of the environment, for the note.
    """
    held_out = {conversation(example.messages) for example in problems.held_out}
    kept = [
        example
        for example in problems.train
        if example.messages == example.source_messages or conversation(example.messages) not in held_out
    ]
    if not kept or len(kept) == len(problems.train):
        return problems
    left_out = len(problems.train) - len(kept)
    note = (
        f"{source}: {left_out} of {len(problems.train)} training problems are left out, because a held-out "
        "one has the same prompt"
    )
    return replace(problems, train=kept, notes=[*problems.notes, note])
