"""Split problems into training and held-out problems that share no question."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from torchrl_grpo.config import Config
from torchrl_grpo.config.schema import EnvConfig
from torchrl_grpo.data import prompts
from torchrl_grpo.data.example import Example, LazyExamples
from torchrl_grpo.data.rows.sources import Row, Splits
from torchrl_grpo.errors import DataError

_log = logging.getLogger(__name__)

#: Seed of the choice of held-out rows. It is independent of ``cfg.seed``, so that runs with different seeds
#: are evaluated on the same problems.
HELD_OUT_SEED = 20_231

ToExample = Callable[[Row, EnvConfig, str], Example]
# Problems with the same key are the same problem.
Key = Callable[[Example], Hashable]


@dataclass
class Problems:
    """The problems of a run.

    Attributes:
        train: training problems in the order of the source.
        held_out: evaluation problems, at most ``eval.num_problems``. None of their questions is in ``train``.
    """

    train: Sequence[Example]
    held_out: list[Example]

    def first_examples(self) -> dict[str, Example]:
        """Return the first training problem by the name of its part, which is empty without a mixture."""
        return {"": self.train[0]}


def question_key(example: Example) -> str:
    """Return the question with normalized spacing. Examples with the same key are the same problem.

    The question is all that was said: conversations that end alike are different problems.
    """
    return " ".join((example.question or conversation(example.messages)).split())


def conversation(messages: Sequence[Mapping[str, object]]) -> str:
    """Return a whole conversation as one text; the message itself if it is the only one and the user's."""
    if len(messages) == 1 and messages[0]["role"] == "user":
        return str(messages[0]["content"])
    return json.dumps([[message["role"], message["content"]] for message in messages], ensure_ascii=False)


def game_key(example: Example) -> tuple[str, str]:
    """Return the question with its hidden answer: in a game, a question says nothing about the answer."""
    return question_key(example), json.dumps(example.truth, sort_keys=True, default=str)


def key_of(cfg: Config) -> Key:
    """Return the function that says which problems of a configuration are the same."""
    return question_key if cfg.env.environment is None else game_key


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
    trusted = prompts.trusted(cfg.env, cfg.env.dataset)

    def examples(rows: list[Row], split: str) -> list[Example]:
        made = []
        for number, row in enumerate(rows, 1):
            example = to_example(row, cfg.env, f"{cfg.env.dataset}/{split}/{number}")
            _check_text(example, row)
            made.append(replace(example, columns=row.values, trusted=trusted))
        return made

    key = key_of(cfg)
    train = ordered(examples(splits.train, "train"), cfg.env.order_by)
    if splits.test is None:
        return split_off(train, cfg.eval.num_problems, splits.train_source, key)
    held_out = examples(splits.test, "test")
    return separate(train, choose(held_out, cfg.eval.num_problems, key), splits.train_source, key)


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
                f"{', '.join(example.columns) or 'none'}. Name one of those that every row has"
            )
    try:
        return sorted(examples, key=lambda example: example.columns[column])
    except TypeError as error:
        raise DataError(
            f"env.order_by={column!r}: its values cannot be compared ({error}); write numbers or texts only"
        ) from error


def choose(examples: list[Example], count: int, key: Key = question_key) -> list[Example]:
    """Choose at most ``count`` examples with different keys, deterministically and in their order."""
    unique = list({key(example): example for example in reversed(examples)}.values())[::-1]
    if len(unique) <= count:
        return unique
    chosen = sorted(random.Random(HELD_OUT_SEED).sample(range(len(unique)), count))
    return [unique[i] for i in chosen]


def split_off(examples: list[Example], count: int, source: str, key: Key = question_key) -> Problems:
    """Hold out ``count`` questions of a source that has no test split.

    Raises:
        DataError: the source has no more than ``count`` different questions.
    """
    questions = len({key(example) for example in examples})
    if questions <= count:
        raise DataError(
            f"{source} has {questions} different questions and no test split; holding out "
            f"eval.num_problems={count} leaves nothing to train on. Lower eval.num_problems to at most "
            f"{max(questions - 1, 0)}, or give a second file as env.eval_data_path"
        )
    return separate(examples, choose(examples, count, key), source, key)


def separate(train: list[Example], held_out: list[Example], source: str, key: Key = question_key) -> Problems:
    """Drop every held-out question from ``train``.

    Raises:
        DataError: no training problem is left.
    """
    kept = without(train, {key(example) for example in held_out}, source, key)
    if not kept:
        raise DataError(
            f"every question of {source} is also held out ({len(train)} rows, {len(held_out)} held out), so "
            "nothing is left to train on; lower eval.num_problems or give other held-out data as "
            "env.eval_data_path"
        )
    return Problems(train=kept, held_out=held_out)


def without(
    train: Sequence[Example], held_out: Set[Hashable], source: str, key: Key = question_key
) -> Sequence[Example]:
    """Return the training problems that are not held out, and log how many are.

    Args:
        train: training problems. Generated ones are replaced by others when they are drawn.
        held_out: keys of the held-out problems.
        source: where the problems come from, for the log.
        key: function that says which problems are the same.
    """
    if isinstance(train, LazyExamples):
        return train.without(held_out)
    kept = [example for example in train if key(example) not in held_out]
    if len(kept) < len(train):
        _log.info("%s: left out %d training problems that are held out", source, len(train) - len(kept))
    return kept
