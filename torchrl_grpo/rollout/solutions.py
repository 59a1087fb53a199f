"""Rounds for supervised fine-tuning: the data set's solutions take the place of sampled responses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.chat import render_text
from torchrl_grpo.envs.group_text import GroupTextEnv, Prompt
from torchrl_grpo.envs.openings import opening
from torchrl_grpo.envs.solution_tokens import solutions
from torchrl_grpo.errors import DataError
from torchrl_grpo.inference.protocol import Probe
from torchrl_grpo.rewards.types import ResponseScore
from torchrl_grpo.rollout.async_collector import AsyncCollector
from torchrl_grpo.rollout.collector import RolloutCollector
from torchrl_grpo.rollout.groups import Group, Response, ScoredGroup
from torchrl_grpo.rollout.interface import CollectorInterface
from torchrl_grpo.rollout.round import Round, build_round
from torchrl_grpo.weight_sync.transport import Delivery


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
        _check(tokenizer, example)
    made = solutions(tokenizer, examples, tokenizer.eos_token_id)
    shortened = sum(solution.is_shortened for solution in made)
    if not shortened:
        return None
    return (
        f"The chat template ends prompts with closed thoughts, so those of {shortened:,} of "
        f"{len(examples):,} solutions are not learned; give another template as model.chat_template "
        "to learn them"
    )


def _check(tokenizer: PreTrainedTokenizerBase, example: Example) -> None:
    if not example.solution.strip():
        raise DataError(
            f"train.method=sft: {example.id} has no solution to learn; name the column of solutions with "
            "env.fields={question:COLUMN,solution:COLUMN}, or take another data set"
        )
    lacks = "<answer>" in example.messages[-1]["content"] and "<answer>" not in example.solution
    if lacks and "<answer>" not in opening(render_text(tokenizer, example)).opened:
        raise DataError(
            f"train.method=sft: the prompt of {example.id} asks for an answer between <answer> and "
            "</answer>, and its solution has none; write env.answer_format=plain"
        )


class SolutionCollector(CollectorInterface):
    """Collects rounds of P solutions. Each is a group of one response with a reward of 1.

    The response has the tokens that the model has to write after its prompt: those of the solution as the
    chat template writes it, up to the token that ends a message. The engine generates in evaluations only.
    Log-probabilities of a sampling policy are 0, because nothing is sampled. The loss does not depend on
    them.

    Args:
        sampling: collector that would sample. It carries weights to the engine, and closes it.
        env: problems, batch size ``[P, 1]``.
        tokenizer: tokenizer of the model.
        end_token_id: token that ends a message.
        max_new_tokens: longest response in tokens. A longer solution is cut, and then has no end token.
        total_dialog_turns: solutions after which iteration ends.
    """

    def __init__(
        self,
        sampling: RolloutCollector | AsyncCollector,
        env: GroupTextEnv,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_token_id: int,
        max_new_tokens: int,
        total_dialog_turns: int,
    ) -> None:
        self._sampling = sampling
        self.env = env
        self.tokenizer = tokenizer
        self.end_token_id = end_token_id
        self.max_new_tokens = max_new_tokens
        self.total_dialog_turns = total_dialog_turns
        self.training_rounds = 0

    @property
    def dialog_turns_per_batch(self) -> int:
        """Solutions in a round."""
        return int(self.env.batch_size.numel())

    @property
    def policy_version(self) -> int:
        """Version of the weights that were published last."""
        return self._sampling.policy_version

    def start(self) -> None:
        """Do nothing: workers have nothing to sample."""

    def shutdown(self) -> None:
        """Close the engine."""
        self._sampling.shutdown()

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int, probe: Probe) -> Delivery:
        """Send weights to the engine: see :meth:`~torchrl_grpo.weight_sync.transport.Transport.send`."""
        return self._sampling.send(weights, version, probe)

    def __iter__(self) -> Iterator[Round]:
        while self.training_rounds * self.dialog_turns_per_batch < self.total_dialog_turns:
            yield self.rollout()

    def rollout(self, is_refill: bool = False) -> Round:
        """Tokenize the solutions of the next problems.

        Args:
            is_refill: not used; no solution is without a signal.

        Raises:
            DataError: a problem cannot be learned, see :func:`check_solutions`.
        """
        prompts = self.env.draw()
        round_ = build_round(
            [self._group(prompt) for prompt in prompts],
            [prompt.text for prompt in prompts],
            reward_names=self.env.reward_set.names,
            pad_token_id=self.tokenizer.pad_token_id,
            seconds={},
        )
        self.training_rounds += 1
        return round_

    def _group(self, prompt: Prompt) -> ScoredGroup:
        _check(self.tokenizer, prompt.example)
        (solution,) = solutions(self.tokenizer, [prompt.example], self.end_token_id)
        tokens = solution.tokens
        is_cut = len(tokens) > self.max_new_tokens
        tokens = tokens[: self.max_new_tokens]
        versions = [self.policy_version] * len(tokens)
        response = Response(tokens, [0.0] * len(tokens), versions, "length" if is_cut else "stop")
        group = Group(prompt.group_id, prompt.token_ids, 0, [response])
        return ScoredGroup(group, [solution.text], [ResponseScore(1.0, {}, {})])

    def round_metrics(self, round_: Round) -> dict[str, float]:
        """Return nothing: no token is generated."""
        return {}

    def summary_entries(self) -> dict[str, Any]:
        """Entries of ``summary.json``."""
        return {"dialog_turns": self.training_rounds * self.dialog_turns_per_batch}

    def state_dict(self) -> dict[str, int]:
        """Rounds so far, and the position in the data."""
        return {"taken": self.training_rounds, **self.env.stream.state_dict()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a :meth:`state_dict`."""
        self.training_rounds = state["taken"]
        self.env.stream.load_state_dict(state)
