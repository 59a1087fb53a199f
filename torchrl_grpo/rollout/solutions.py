"""Groups for supervised fine-tuning: the data set's solutions take the place of sampled responses."""

from __future__ import annotations

from collections.abc import Sequence

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.chat import render_text
from torchrl_grpo.envs.group_text import GroupTextEnv
from torchrl_grpo.envs.openings import opening
from torchrl_grpo.envs.solution_tokens import solutions
from torchrl_grpo.errors import DataError
from torchrl_grpo.rewards.types import ResponseScore
from torchrl_grpo.rollout.groups import Group, Response, ScoredGroup


def check_solutions(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]) -> str | None:
    """Refuse problems that cannot be learned.

    Args:
        tokenizer: tokenizer of the model.
        examples: the problems.

    Returns:
        A message about thoughts that are not learned, because the prompts have closed theirs; None if there
        are none.

    Raises:
        DataError: a problem has no solution, its prompt asks for tags that the solution has not, or its
            tokens cannot be cut where the solution begins.
    """
    for example in examples:
        _check(tokenizer, example, others=examples)
    made = solutions(tokenizer, examples, tokenizer.eos_token_id)
    shortened = sum(solution.is_shortened for solution in made)
    if not shortened:
        return None
    return (
        f"The chat template ends prompts with closed thoughts, so those of {shortened:,} of "
        f"{len(examples):,} solutions are not learned; give another template as model.chat_template "
        "to learn them"
    )


def _check(tokenizer: PreTrainedTokenizerBase, example: Example, others: Sequence[Example] = ()) -> None:
    if not example.solution.strip():
        fix = (
            "write one into its row, or leave the row out"
            if any(other.solution.strip() for other in others)
            else "name the column of solutions with env.fields={question:COLUMN,solution:COLUMN}, or take "
            "another data set"
        )
        raise DataError(f"train.method=sft: {example.id} has no solution to learn; {fix}")
    lacks = "<answer>" in example.messages[-1]["content"] and "<answer>" not in example.solution
    if lacks and "<answer>" not in opening(render_text(tokenizer, example)).opened:
        raise DataError(
            f"train.method=sft: the prompt of {example.id} asks for an answer between <answer> and "
            "</answer>, and its solution has none; write env.answer_format=plain"
        )


class SolutionSource:
    """Creates groups of one response for supervised fine-tuning: a solution, with a reward of 1.

    The response has the tokens that the model has to write after its prompt: those of the solution as the
    chat template writes it, up to the token that ends a message. Log-probabilities of a sampling policy are
    0, because nothing is sampled. The loss does not depend on them.

    Args:
        env: problems, batch size ``[P, 1]``.
        tokenizer: tokenizer of the model.
        end_token_id: token that ends a message.
        max_new_tokens: longest response in tokens. A longer solution is cut, and then has no end token.
    """

    def __init__(
        self, env: GroupTextEnv, tokenizer: PreTrainedTokenizerBase, end_token_id: int, max_new_tokens: int
    ) -> None:
        self.env = env
        self.tokenizer = tokenizer
        self.end_token_id = end_token_id
        self.max_new_tokens = max_new_tokens

    def group(self, number: int, version: int) -> ScoredGroup:
        """Return group ``number``, as if weights of ``version`` had sampled it.

        Raises:
            DataError: a problem cannot be learned, see :func:`check_solutions`.
        """
        prompt = self.env.prompt(number)
        _check(self.tokenizer, prompt.example)
        (solution,) = solutions(self.tokenizer, [prompt.example], self.end_token_id)
        tokens = solution.tokens[: self.max_new_tokens]
        reason = "length" if len(solution.tokens) > self.max_new_tokens else "stop"
        response = Response(tokens, [0.0] * len(tokens), [version] * len(tokens), reason)
        group = Group(number, prompt.token_ids, 0, [response], pictures=prompt.pictures)
        return ScoredGroup(group, [solution.text], [ResponseScore(1.0, {}, {})])
