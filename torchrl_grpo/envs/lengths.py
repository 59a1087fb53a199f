"""Prompts that leave no room for their answers: left out or cut before the run starts, as configured.

Only the question is cut, never the chat template or what stands around the question in
``env.prompt_template``: the model still reads a whole turn, and that it is asked to answer. Left out:
refusing such a prompt, which the environment and the evaluation do by themselves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

from torchrl_grpo.config import Config
from torchrl_grpo.data import prompts
from torchrl_grpo.data.example import Example
from torchrl_grpo.data.problems import Problems, separate
from torchrl_grpo.envs.chat import lengths_above, render
from torchrl_grpo.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Stands where something was taken out of the middle.
_GAP = " ... "


def fit(problems: Problems, tokenizer: PreTrainedTokenizerBase, cfg: Config) -> tuple[Problems, str | None]:
    """Make every prompt short enough, by ``env.overlong_prompts``.

    Args:
        problems: of the run. Training problems that are generated when they are drawn are cut then.
        tokenizer: renders and counts.
        cfg: the configuration; ``inference_model.max_model_len`` less ``max_new_tokens`` is the bound.

    Returns:
        Problems whose prompts fit, or with ``error`` those that came in; and a line about what was done, or
        None.

    Raises:
        DataError: nothing is left to train on or to be measured by, or a prompt is too long without its
            question.
        ModelError: there is no chat template, or it cannot render an example.
    """
    how = cfg.env.overlong_prompts
    if how == "error":
        return problems, None
    bound = cfg.inference_model.max_model_len - cfg.inference_model.max_new_tokens
    known = isinstance(problems.train, list)
    long_train = lengths_above(tokenizer, problems.train, bound) if known else {}
    long_held_out = lengths_above(tokenizer, problems.held_out, bound)
    if how == "drop":
        assert known, "refused with the configuration"
        fitted = Problems(
            _others("train on", problems.train, long_train, bound),
            _others("be measured by", problems.held_out, long_held_out, bound),
        )
    else:
        cut = Cutter(cfg, tokenizer, bound)
        held_out = [cut(one) if i in long_held_out else one for i, one in enumerate(problems.held_out)]
        if not known:
            fitted = Problems(_CutWhenDrawn(problems.train, cut), held_out)
        else:
            train = [cut(one) if i in long_train else one for i, one in enumerate(problems.train)]
            fitted = Problems(train, held_out)
            if long_train or long_held_out:
                # What was cut off may have been all that told two of them apart.
                fitted = separate(train, held_out, "what env.overlong_prompts has cut")
    if not long_train and not long_held_out:
        return fitted, None
    held_out_too = f"{len(long_held_out)} of {len(problems.held_out)} held-out"
    if not known:
        return fitted, (
            f"env.overlong_prompts={how}: {held_out_too} problems are cut, their prompts have more than "
            f"{bound} tokens; training problems are cut when they are drawn, and not counted"
        )
    return fitted, (
        f"env.overlong_prompts={how}: {len(long_train)} of {len(problems.train)} training problems and "
        f"{held_out_too} ones are {'left out' if how == 'drop' else 'cut'}, their prompts have more than "
        f"{bound} tokens"
    )


class Cutter:
    """Takes from a question what its prompt is too long by.

    Args:
        cfg: ``env`` says where to cut and what stands around a question.
        tokenizer: renders and counts.
        bound: tokens that a prompt may have.
    """

    def __init__(self, cfg: Config, tokenizer: PreTrainedTokenizerBase, bound: int) -> None:
        self._how = cfg.env.overlong_prompts
        self._before, self._after = prompts.frame(cfg.env, cfg.env.dataset)
        self._tokenizer, self._bound = tokenizer, bound

    def __call__(self, example: Example) -> Example:
        """The problem with as much of its question as fits; the same where all of it does.

        Raises:
            DataError: its prompt is too long without the question.
        """
        content = example.messages[-1]["content"]
        question = content[len(self._before) : len(content) - len(self._after)]
        keep = len(question)
        found, tokens = example, self._tokens(example)
        if tokens > self._bound:
            around = self._tokens(self._with(example, ""))
            if around > self._bound:
                raise DataError(
                    f"The prompt of {example.id} has {around} tokens without its question, and at most "
                    f"{self._bound} fit: in a new run raise inference_model.max_model_len, lower "
                    "inference_model.max_new_tokens, or shorten env.system_prompt or env.prompt_template."
                )
        while tokens > self._bound:
            # As many characters as the tokens over the bound have on average; more where that was not enough.
            average = keep / max(1, tokens - around)
            keep = max(0, keep - max(1, math.ceil(average * (tokens - self._bound))))
            found = self._with(example, self._cut(question, keep))
            tokens = self._tokens(found)
        return found

    def _cut(self, question: str, keep: int) -> str:
        if self._how == "truncate_left":
            return question[len(question) - keep :]
        if self._how == "truncate_right":
            return question[:keep]
        end = keep // 2
        return question[: keep - end] + _GAP + question[len(question) - end :] if keep else ""

    def _with(self, example: Example, question: str) -> Example:
        last = {**example.messages[-1], "content": self._before + question + self._after}
        return dataclasses.replace(example, messages=[*example.messages[:-1], last])

    def _tokens(self, example: Example) -> int:
        return len(render(self._tokenizer, example.messages)[1])


class _CutWhenDrawn(Sequence[Example]):
    """Problems that are generated when they are asked for, cut when they have been."""

    def __init__(self, problems: Sequence[Example], cut: Cutter) -> None:
        self._problems, self._cut = problems, cut

    def __len__(self) -> int:
        return len(self._problems)

    @overload
    def __getitem__(self, index: int) -> Example: ...

    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...

    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self._cut(one) for one in self._problems[index]]
        return self._cut(self._problems[index])


def _others(purpose: str, examples: Sequence[Example], left_out: dict[int, int], bound: int) -> list[Example]:
    kept = [one for i, one in enumerate(examples) if i not in left_out]
    if examples and not kept:
        raise DataError(
            f"env.overlong_prompts=drop: each of {len(examples)} problems to {purpose} has a prompt of more "
            f"than {bound} tokens, so none is left; raise inference_model.max_model_len or lower "
            "inference_model.max_new_tokens"
        )
    return kept
