"""The prompt of a teacher that sees more of the problem than the policy does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from torchrl_grpo.config import Config
from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.chat import render
from torchrl_grpo.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# In a hint, what the solution of the problem replaces.
SOLUTION = "{solution}"


def teacher_prompt(cfg: Config, tokenizer: PreTrainedTokenizerBase) -> Callable[[Example], list[int]] | None:
    """Return the function that makes the prompt of the teacher; None if the teacher reads the policy's."""
    hint, options = cfg.teacher_model.hint, cfg.inference_model
    if cfg.policy.distill_coef == 0 or hint is None:
        return None
    max_tokens = options.max_model_len - options.max_new_tokens
    return partial(hinted_prompt, tokenizer, hint=hint, max_tokens=max_tokens)


def hinted_prompt(
    tokenizer: PreTrainedTokenizerBase, example: Example, hint: str, max_tokens: int
) -> list[int]:
    """Return the token ids of a prompt whose last message ends with a hint.

    Args:
        tokenizer: a Hugging Face tokenizer.
        example: the problem.
        hint: text, in which the solution of the problem replaces ``{solution}``.
        max_tokens: length of the longest prompt that leaves room for a response.

    Raises:
        DataError: the problem has no solution, or the prompt is too long.
        ModelError: there is no chat template, or it cannot render the messages.
    """
    if not example.solution.strip():
        raise DataError(
            f"teacher_model.hint: {example.id} has no solution; name the column of solutions with "
            "env.fields={question:COLUMN,solution:COLUMN}, or take another data set"
        )
    *before, last = example.messages
    content = f"{last['content']}\n\n{hint.replace(SOLUTION, example.solution)}"
    _, token_ids = render(tokenizer, replace(example, messages=[*before, {**last, "content": content}]))
    if len(token_ids) > max_tokens:
        raise DataError(
            f"teacher_model.hint: with it the prompt of {example.id} has {len(token_ids)} tokens, and only "
            f"{max_tokens} leave room for a response; raise inference_model.max_model_len, or shorten the "
            "hint"
        )
    return token_ids
