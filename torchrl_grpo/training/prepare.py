"""Prepares the problems of a run for its tokenizer, and refuses those that it cannot use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from torchrl_grpo.config import Config
from torchrl_grpo.config.keys import bad_value
from torchrl_grpo.data.mixture import map_parts
from torchrl_grpo.data.problems import Problems
from torchrl_grpo.envs import lengths
from torchrl_grpo.envs.chat import check_contents, render_text
from torchrl_grpo.envs.control_tokens import control_tokens
from torchrl_grpo.envs.episodes.build import with_prompts
from torchrl_grpo.envs.hints import teacher_prompt
from torchrl_grpo.envs.responses import note_on_reading
from torchrl_grpo.rewards.graders import LOSS, CountingGrader
from torchrl_grpo.rewards.registry import joined_rewards, unasked_tags
from torchrl_grpo.rollout.solutions import check_solutions
from torchrl_grpo.training.evaluator import Evaluator

Notify = Callable[[str | None], None]


def prepare(
    cfg: Config,
    tokenizer: PreTrainedTokenizerBase,
    problems: Problems,
    grader: CountingGrader,
    notify: Notify,
) -> tuple[Problems, Evaluator | None]:
    """Return the problems as the model reads them, and what evaluates the held-out ones.

    Args:
        cfg: configuration of the run.
        tokenizer: tokenizer of the model.
        problems: problems of the data set.
        grader: grader of held-out responses.
        notify: function called with what the user should know.

    Returns:
        The problems, and the evaluator; None if the loss of held-out solutions is measured.

    Raises:
        DataError: a problem cannot be used.
        ConfigError: ``train.stop_at`` is a value that no loss reaches.
    """
    problems = map_parts(cfg, problems, partial(fit_prompts, tokenizer, notify))
    by_loss = grader.primary == LOSS
    if by_loss and cfg.train.stop_at is not None and cfg.train.stop_at > 0:
        wrong = "the loss of held-out solutions is measured, and its negative never reaches this value"
        raise bad_value("train.stop_at", cfg.train.stop_at, wrong, f"train.stop_at={-cfg.train.stop_at:g}")
    if cfg.train.method == "sft":
        # Of problems that are generated on demand, the others are checked when they are drawn.
        known = problems.train if isinstance(problems.train, list) else [problems.train[0]]
        notify(check_solutions(tokenizer, known))
        check_solutions(tokenizer, problems.held_out if by_loss else [])
    if (hinted := teacher_prompt(cfg, tokenizer)) is not None:
        for example in problems.train if isinstance(problems.train, list) else [problems.train[0]]:
            hinted(example)
    notify(note_on_reading(tokenizer, render_text(tokenizer, problems.train[0])))
    notify(joined_rewards(cfg))
    for note in grader.notes:
        notify(note)
    return problems, None if by_loss else Evaluator(problems.held_out, tokenizer, grader, cfg)


def fit_prompts(
    tokenizer: PreTrainedTokenizerBase, notify: Notify, cfg: Config, problems: Problems
) -> Problems:
    """Return the problems of a part of a mixture, or of a run, without prompts that are too long."""
    problems = with_prompts(cfg, problems, tokenizer)
    check_contents(tokenizer, problems.train[0])
    notify(unasked_tags(cfg, problems.train[0]))
    problems, message = lengths.handle_overlong_prompts(problems, tokenizer, cfg)
    for note in [*problems.notes, message]:
        notify(note)
    notify(control_tokens(tokenizer).note_on(problems, with_solutions=cfg.train.method == "sft"))
    return problems
