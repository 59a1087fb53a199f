"""Random episodes of several turns, and what their tokens, masks and log-probabilities must be."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.episodes.chat_tokens import TurnTokens
from torchrl_grpo.envs.episodes.engine import EpisodeEngine
from torchrl_grpo.envs.episodes.runner import EpisodeRunner, RunnerOptions
from torchrl_grpo.envs.episodes.types import Environment, Step
from torchrl_grpo.inference.protocol import Completion, Request, SteppingEngine


class Talk:
    """Says something different after each message, as a user or as tools, and ends when it likes."""

    def reset(self, example: Example) -> None:
        self.random = random.Random(example.id)

    def step(self, message: str) -> Step:
        if self.random.random() < 0.25:
            return Step(reward=1.0, done=True)
        roles = self.random.choice([["user"], ["tool"], ["tool", "tool"], ["tool", "user"]])
        messages = [
            {"role": role, "content": f"{message[-5:]!r}? no, {self.random.random()}"} for role in roles
        ]
        return Step(messages, reward=self.random.random())


@dataclass
class Record:
    """What an engine was asked and what it answered, by the key of the request."""

    requests: dict[Hashable, list[Request]] = field(default_factory=dict)
    answered: dict[Hashable, list[Completion]] = field(default_factory=dict)


def record(engine: SteppingEngine, patch: Any) -> Record:
    """Record the calls of an engine from now on, until ``patch`` (a ``MonkeyPatch``) is undone."""
    calls = Record()
    submit, step, abort_all = engine.submit, engine.step, engine.abort_all

    def recorded_submit(requests: Sequence[Request]) -> None:
        for request in requests:
            calls.requests.setdefault(request.key, []).append(request)
        submit(requests)

    def recorded_step() -> list[tuple[Hashable, Completion]]:
        ended = step()
        for key, completion in ended:
            calls.answered.setdefault(key, []).append(completion)
        return ended

    def recorded_abort() -> dict[Hashable, Completion]:
        taken = abort_all()
        for key, completion in taken.items():
            calls.answered.setdefault(key, []).append(completion)
        return taken

    patch.setattr(engine, "submit", recorded_submit)
    patch.setattr(engine, "step", recorded_step)
    patch.setattr(engine, "abort_all", recorded_abort)
    return calls


def talking(
    engine: SteppingEngine,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_turns: int = 5,
    max_turn_tokens: int | None = None,
    max_episodes: int = 4,
    environment: type[Environment] = Talk,
) -> EpisodeEngine:
    """Give an engine episodes of an environment."""
    options = RunnerOptions(
        {}, environment, in_own_process=False, host=None, timeout_s=5.0, max_characters=100
    )
    return EpisodeEngine(
        engine,
        tokenizer,
        TurnTokens(tokenizer),
        partial(EpisodeRunner, options),
        is_quick=True,
        max_turns=max_turns,
        max_turn_tokens=max_turn_tokens,
        max_episodes=max_episodes,
        close=lambda: None,
    )


def problems(count: int) -> list[Example]:
    return [Example(f"p{n}", [{"role": "user", "content": f"What is {n} + {n * n}?"}]) for n in range(count)]


def check_tokens(prompts: list[list[int]], groups: list[list[Completion]], calls: Record) -> int:
    """Check that episodes have the tokens that the engine saw and sampled; return the number of turns."""
    turns = 0
    for number, group in enumerate(groups):
        for sample, episode in enumerate(group):
            key = ("generate", number, sample)
            whole = list(prompts[number])
            sampled: list[bool] = []
            log_probs: list[float] = []
            for request, answer in zip(calls.requests[key], calls.answered[key], strict=True):
                # The engine saw all that came before, unchanged.
                assert list(request.tokens)[: len(whole)] == whole
                between = len(request.tokens) - len(whole)
                whole = [*request.tokens, *answer.token_ids]
                sampled += [False] * between + [True] * len(answer.token_ids)
                log_probs += [0.0] * between + answer.log_probs
            assert whole[len(prompts[number]) :] == episode.token_ids
            assert episode.sampled == sampled and episode.log_probs == log_probs
            assert sampled[0] and sampled[-1], "an episode begins and ends with a token of the model"
            kept = episode.record
            assert kept is not None
            assert kept.turns == len(calls.requests[key]) == len(kept.messages_of_model)
            turns += kept.turns
    return turns
