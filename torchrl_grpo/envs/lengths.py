"""Drop or cut prompts that leave no room for their responses, as ``env.overlong_prompts`` says.

Only the question is cut, and neither the chat template nor the rest of ``env.prompt_template``. So the model
still reads a complete turn with the request to respond. With ``env.overlong_prompts=error`` the environment
and the evaluation reject such prompts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchrl_grpo.config import Config
from torchrl_grpo.data import prompts
from torchrl_grpo.data.example import Example, LazyExamples
from torchrl_grpo.data.identity import conversation
from torchrl_grpo.data.problems import Problems, separate
from torchrl_grpo.envs.chat import lengths_above, render
from torchrl_grpo.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Replaces the text that is cut from the middle.
_GAP = " ... "


def handle_overlong_prompts(
    problems: Problems, tokenizer: PreTrainedTokenizerBase, cfg: Config
) -> tuple[Problems, str | None]:
    """Make every prompt short enough, as ``env.overlong_prompts`` says.

    Args:
        problems: problems of the run. Training problems that are generated on demand are cut when drawn.
        tokenizer: tokenizer that renders and counts.
        cfg: configuration. The longest prompt has ``inference_model.max_model_len - max_new_tokens`` tokens.

    Returns:
        Problems whose prompts fit, or the given problems for ``error``, and a message about the changes or
        None.

    Raises:
        DataError: no training or no held-out problem is left, or a prompt is too long even without its
            question.
        ModelError: there is no chat template, or it cannot render an example.
    """
    mode = cfg.env.overlong_prompts
    if mode == "error":
        return problems, None
    bound = cfg.inference_model.max_model_len - cfg.inference_model.max_new_tokens
    is_list = isinstance(problems.train, list)
    long_train = lengths_above(tokenizer, problems.train, bound) if is_list else {}
    long_held_out = lengths_above(tokenizer, problems.held_out, bound)
    if mode == "drop":
        assert is_list, "the configuration checks reject drop for generated problems"
        fitted = dataclasses.replace(
            problems,
            train=_drop("train on", problems.train, long_train, bound),
            held_out=_drop("evaluate on", problems.held_out, long_held_out, bound),
        )
    else:
        cut = Cutter(cfg, tokenizer, bound)
        held_out = [
            cut(example) if i in long_held_out else example for i, example in enumerate(problems.held_out)
        ]
        if not is_list:
            fitted = dataclasses.replace(
                problems, train=_CutWhenDrawn(problems.train, cut), held_out=held_out
            )
        else:
            train = [cut(example) if i in long_train else example for i, example in enumerate(problems.train)]
            fitted = dataclasses.replace(problems, train=train, held_out=held_out)
            if long_train or long_held_out:
                # Two questions may differ only in the text that was cut off.
                fitted = separate(fitted, "what env.overlong_prompts has cut")
    if not long_train and not long_held_out:
        return fitted, None
    held_out_cut = f"{len(long_held_out)} of {len(problems.held_out)} held-out"
    if not is_list:
        return fitted, (
            f"env.overlong_prompts={mode}: {held_out_cut} problems are cut, because their prompts have more "
            f"than {bound} tokens; training problems are cut when they are drawn, and are not counted"
        )
    return fitted, (
        f"env.overlong_prompts={mode}: {len(long_train)} of {len(problems.train)} training problems and "
        f"{held_out_cut} ones are {'left out' if mode == 'drop' else 'cut'}, because their prompts have more "
        f"than {bound} tokens"
    )


class Cutter:
    """Shortens questions so that their prompts fit.

    Args:
        cfg: configuration; ``env.overlong_prompts`` and the prompt keys of ``env`` are read.
        tokenizer: tokenizer that renders and counts.
        bound: longest allowed prompt in tokens.
    """

    def __init__(self, cfg: Config, tokenizer: PreTrainedTokenizerBase, bound: int) -> None:
        self._mode = cfg.env.overlong_prompts
        self._before, self._after = prompts.frame(cfg.env, cfg.env.dataset)
        self._has_system_prompt = cfg.env.system_prompt is not None
        self._tokenizer, self._bound = tokenizer, bound

    def __call__(self, example: Example) -> Example:
        """Return the problem with as much of its question as fits.

        Raises:
            DataError: the prompt is too long even without the question.
        """
        before, question, after = self._divide(example.messages[-1]["content"])
        keep = len(question)
        fitted, tokens = example, self._tokens(example)
        if tokens > self._bound:
            around = self._tokens(self._with(example, before, "", after))
            if around > self._bound:
                raise DataError(
                    f"The prompt of {example.id} has {around} tokens without its question, and at most "
                    f"{self._bound} fit: in a new run raise inference_model.max_model_len, lower "
                    "inference_model.max_new_tokens, or shorten env.system_prompt or env.prompt_template."
                )
        while tokens > self._bound:
            # Cut the average number of characters of the excess tokens, and repeat if that was not enough.
            average = keep / max(1, tokens - around)
            keep = max(0, keep - max(1, math.ceil(average * (tokens - self._bound))))
            fitted = self._with(example, before, self._cut(question, keep), after)
            tokens = self._tokens(fitted)
        return fitted

    def _cut(self, question: str, keep: int) -> str:
        if self._mode == "truncate_left":
            return question[len(question) - keep :]
        if self._mode == "truncate_right":
            return question[:keep]
        end = keep // 2
        return question[: keep - end] + _GAP + question[len(question) - end :] if keep else ""

    def _divide(self, content: str) -> tuple[str, str, str]:
        """Divide the last message into the question and what the template has put around it."""
        before, after = self._before, self._after
        within = len(before) + len(after) <= len(content)
        if not (within and content.startswith(before) and content.endswith(after)):
            # A message of a chat is used as it is.
            before = after = ""
        return before, content[len(before) : len(content) - len(after)], after

    def _with(self, example: Example, before: str, question: str, after: str) -> Example:
        last = {**example.messages[-1], "content": before + question + after}
        messages = [*example.messages[:-1], last]
        # What is cut off must not make two problems different.
        own = messages[1:] if self._has_system_prompt else messages
        text = question if before or after else conversation(own)
        return dataclasses.replace(example, messages=messages, question=text)

    def _tokens(self, example: Example) -> int:
        return len(render(self._tokenizer, example)[1])


class _CutWhenDrawn(LazyExamples):
    """Problems that are generated on demand and then cut."""

    def __init__(self, problems: Sequence[Example], cut: Cutter) -> None:
        self._problems, self._cut = problems, cut

    def __len__(self) -> int:
        return len(self._problems)

    def example_at(self, index: int) -> Example:
        return self._cut(self._problems[index])


def _drop(purpose: str, examples: Sequence[Example], too_long: dict[int, int], bound: int) -> list[Example]:
    kept = [example for i, example in enumerate(examples) if i not in too_long]
    if examples and not kept:
        raise DataError(
            f"env.overlong_prompts=drop: all {len(examples)} problems to {purpose} have prompts of more than "
            f"{bound} tokens, so none is left; raise inference_model.max_model_len or lower "
            "inference_model.max_new_tokens"
        )
    return kept
