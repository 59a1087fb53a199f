"""An engine whose responses are whole episodes: it hands the model's turns to the environment and goes on.

It wraps an engine and has the same interface. So collectors, workers, ranks and the evaluation treat an
episode as they treat a response of one turn. An episode's tokens are those that the model sampled, exactly as
it sampled them, and between its turns the tokens of the other messages. Only a finished episode is returned.
While the environment of one episode answers, the engine generates the others.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.episodes.chat_tokens import TurnTokens
from torchrl_grpo.envs.episodes.runner import EpisodeRunner
from torchrl_grpo.envs.episodes.types import Step
from torchrl_grpo.envs.openings import Opening, opening_of_tokens
from torchrl_grpo.envs.responses import written_texts
from torchrl_grpo.inference.checksums import Checksums
from torchrl_grpo.inference.protocol import Completion, Probe, ProbeResult, Request, SteppingEngine
from torchrl_grpo.runtime.rng import derive_seed

# Longest wait for an answer when the engine has nothing to generate, in seconds. The caller then looks for
# other work.
_WAIT_S = 0.25
# Time to wait for an answer. Without it, the speed of the machine would decide which requests are generated
# in one batch, and so how their numbers are rounded.
_PATIENCE_S = 0.05


@dataclass
class _Episode:
    """An episode that has not finished.

    Attributes:
        request: request that began it or continued it last.
        runner: its environment.
        order: number of the episode, by which simultaneous answers are sorted.
        tokens: tokens since the last submission, with ``log_probs`` and ``sampled`` of each.
        turn: tokens of the model's current turn.
        opening: what the prompt of the current turn has written of it.
        waits: whether the environment is answering.
        answer: answer that came while the episode was interrupted.
        interrupted: whether it was aborted and not yet continued.
    """

    request: Request
    runner: EpisodeRunner
    order: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    opening: Opening = field(default_factory=Opening)
    waits: bool = False
    answer: Step | None = None
    interrupted: bool = False

    def take(self, completion: Completion) -> None:
        """Append tokens that the model sampled."""
        self.tokens += completion.token_ids
        self.log_probs += completion.log_probs
        self.sampled += [True] * len(completion.token_ids)
        self.turn += completion.token_ids

    def insert(self, tokens: Sequence[int]) -> None:
        """Append tokens of other messages, and begin the model's next turn."""
        self.tokens += tokens
        self.log_probs += [0.0] * len(tokens)
        self.sampled += [False] * len(tokens)
        self.turn = []

    def hand_over(self, finish_reason: str) -> Completion:
        """Return the tokens since the last submission, and forget them."""
        record = None if finish_reason == "aborted" else self.runner.record
        completion = Completion(self.tokens, self.log_probs, finish_reason, self.sampled, record)
        self.tokens, self.log_probs, self.sampled = [], [], []
        return completion


class EpisodeEngine(SteppingEngine):
    """Generates episodes with another engine.

    ``max_new_tokens`` of a request bounds the whole episode: the model's tokens and those between its turns.
    An episode ends with ``"stop"`` when its environment ends it, or after ``max_turns``. Without an
    environment, it ends when the model calls no tool. It ends with ``"length"`` when a turn is cut off, or
    when the next messages do not fit.

    Args:
        engine: engine that generates. Requests without a problem go to it unchanged.
        tokenizer: tokenizer of the model.
        turn_tokens: renders what comes between two turns.
        make_runner: function that makes the environment of an episode from its problem.
        is_quick: whether environments answer at once, and need no threads.
        max_turns: largest number of turns of the model in an episode.
        max_turn_tokens: largest number of tokens of a turn; None for no limit.
        stop_token_ids: tokens that end a turn beside the model's end tokens.
        max_episodes: number of environments that may answer at the same time.
        close: function that frees what the environments share.
    """

    def __init__(
        self,
        engine: SteppingEngine,
        tokenizer: PreTrainedTokenizerBase,
        turn_tokens: TurnTokens,
        make_runner: Callable[[Example], EpisodeRunner],
        *,
        is_quick: bool,
        max_turns: int,
        max_turn_tokens: int | None,
        stop_token_ids: tuple[int, ...] = (),
        max_episodes: int,
        close: Callable[[], None],
    ) -> None:
        self.engine = engine
        self._tokenizer = tokenizer
        self._turn_tokens = turn_tokens
        self._make_runner = make_runner
        self._max_turns = max_turns
        self._max_turn_tokens = max_turn_tokens
        self._stop_token_ids = stop_token_ids
        self._close = close
        self._threads = None if is_quick else ThreadPoolExecutor(max_episodes, thread_name_prefix="episode")
        self._episodes: dict[Hashable, _Episode] = {}
        self._count = 0
        # Requests that the engine generates now.
        self._generating: set[Hashable] = set()
        # Answers of environments, with the key of the episode.
        self._answers: queue.SimpleQueue[tuple[Hashable, Step | BaseException]] = queue.SimpleQueue()
        # Time at which the environment of an episode was asked.
        self._asked: dict[Hashable, float] = {}
        self._is_slow = False
        self._ended: list[tuple[Hashable, Completion]] = []

    @property
    def policy_version(self) -> int:
        """Version of the weights in use."""
        return self.engine.policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self.engine.policy_version = version

    def submit(self, requests: Sequence[Request]) -> None:
        """See :meth:`SteppingEngine.submit`. The key of an aborted episode continues it."""
        generate: list[Request] = []
        for request in requests:
            if request.problem is None:
                generate.append(request)
                continue
            episode = self._episodes.get(request.key)
            if episode is None:
                self._count += 1
                start = opening_of_tokens(self._tokenizer, request.tokens)
                runner = self._make_runner(request.problem)
                episode = _Episode(request, runner, self._count, opening=start)
                self._episodes[request.key] = episode
                generate.append(self._bounded(episode, request))
                continue
            assert episode.interrupted, f"there is an episode {request.key!r} already"
            episode.request, episode.interrupted = request, False
            if not episode.waits and episode.answer is None:
                generate.append(self._bounded(episode, request))
        self._submit(generate)
        continued = [(request.key, self._episodes.get(request.key)) for request in requests]
        for key, episode in continued:
            if episode is not None and episode.answer is not None:
                answer, episode.answer = episode.answer, None
                self._go_on(key, episode, answer)

    def step(self) -> list[tuple[Hashable, Completion]]:
        if self._generating:
            for key, completion in self.engine.step():
                self._generating.discard(key)
                episode = self._episodes.get(key)
                if episode is None:
                    self._ended.append((key, completion))
                else:
                    self._end_turn(key, episode, completion)
        self._take_answers()
        ended, self._ended = self._ended, []
        return ended

    def abort_all(self) -> dict[Hashable, Completion]:
        """See :meth:`SteppingEngine.abort_all`. Environments that are answering go on."""
        taken = dict(self._ended)
        self._ended = []
        for key, completion in self.engine.abort_all().items():
            episode = self._episodes.get(key)
            if episode is None:
                taken[key] = completion
            else:
                episode.take(completion)
        self._generating.clear()
        for key, episode in self._episodes.items():
            if not episode.interrupted:
                episode.interrupted = True
                taken[key] = episode.hand_over("aborted")
        return taken

    def forget(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            episode = self._episodes.pop(key, None)
            if episode is not None:
                # A thread that uses the environment finds its process ended.
                episode.runner.close()
                self._asked.pop(key, None)

    def _submit(self, requests: Sequence[Request]) -> None:
        if requests:
            self.engine.submit(requests)
            self._generating.update(request.key for request in requests)

    def _end_turn(self, key: Hashable, episode: _Episode, completion: Completion) -> None:
        episode.take(completion)
        (written,) = written_texts(self._tokenizer, [replace(completion, token_ids=episode.turn)])
        text = episode.opening.opened + written
        episode.runner.record.block = episode.opening.block
        if completion.finish_reason == "length":
            # The environment does not see a message that was cut off.
            episode.runner.record.turns += 1
            episode.runner.record.add_message_of_model(text)
            self._finish(key, episode, "length")
        elif self._threads is None:
            self._go_on(key, episode, episode.runner.step(text))
        else:
            episode.waits = True
            self._asked[key] = time.monotonic()
            future = self._threads.submit(episode.runner.step, text)
            future.add_done_callback(lambda done: self._answers.put((key, done.exception() or done.result())))

    def _take_answers(self) -> None:
        """Let the episodes whose environments have answered go on, in an order that does not vary."""
        arrived: list[tuple[Hashable, Step | BaseException]] = []
        while self._asked:
            # Without anything to generate, wait for the first answer.
            wait = self._patience() if self._generating or self._ended or arrived else _WAIT_S
            try:
                key, answer = self._answers.get(timeout=wait) if wait > 0 else self._answers.get_nowait()
            except queue.Empty:
                if wait > 0 and self._generating:
                    # Slow environments are not waited for again until one of them answers quickly.
                    self._is_slow = True
                break
            asked_at = self._asked.pop(key, None)
            if asked_at is None:
                # The episode was forgotten.
                continue
            self._is_slow = time.monotonic() - asked_at > _PATIENCE_S
            arrived.append((key, answer))
        for key, answer in sorted(arrived, key=lambda arrival: self._episodes[arrival[0]].order):
            if isinstance(answer, BaseException):
                raise answer
            episode = self._episodes[key]
            episode.waits = False
            if episode.interrupted:
                episode.answer = answer
            else:
                self._go_on(key, episode, answer)

    def _patience(self) -> float:
        if self._is_slow:
            return 0.0
        return max(self._asked.values()) + _PATIENCE_S - time.monotonic()

    def _go_on(self, key: Hashable, episode: _Episode, step: Step) -> None:
        if step.done or episode.runner.record.turns >= self._max_turns:
            self._finish(key, episode, "stop")
            return
        between = self._turn_tokens.between(episode.turn[-1], step.messages)
        request = episode.request
        room = request.max_new_tokens - len(episode.tokens) - len(between)
        if room < 1:
            self._finish(key, episode, "length")
            return
        episode.insert(between)
        episode.opening = opening_of_tokens(self._tokenizer, between)
        self._submit([self._next_turn(episode, room)])

    def _next_turn(self, episode: _Episode, room: int) -> Request:
        request = episode.request
        seed = request.seed
        if seed is not None:
            # The next turn must not draw again what an earlier one drew.
            seed = derive_seed(seed, "turn", episode.runner.record.turns)
        tokens = [*request.tokens, *episode.tokens]
        return self._bounded(episode, replace(request, tokens=tokens, max_new_tokens=room, seed=seed))

    def _bounded(self, episode: _Episode, request: Request) -> Request:
        """Bound a request by the length of a turn, of which a part may be generated already."""
        request = replace(request, stop_token_ids=self._stop_token_ids)
        if self._max_turn_tokens is None:
            return request
        room = self._max_turn_tokens - len(episode.turn)
        return replace(request, max_new_tokens=min(request.max_new_tokens, room))

    def _finish(self, key: Hashable, episode: _Episode, reason: str) -> None:
        episode.runner.close()
        del self._episodes[key]
        self._ended.append((key, episode.hand_over(reason)))

    def next_tokens(self, probe: Probe) -> ProbeResult:
        return self.engine.next_tokens(probe)

    def start_update(self) -> None:
        self.engine.start_update()

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.engine.update(weights)

    def finish_update(self) -> None:
        self.engine.finish_update()

    def locate_weights(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.engine.locate_weights(shapes)

    def checksums(self) -> tuple[Checksums, ...]:
        return self.engine.checksums()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.engine.load_weights(weights)

    def reset_cache(self) -> None:
        self.engine.reset_cache()

    def sleep(self) -> None:
        self.engine.sleep()

    def wake(self) -> None:
        self.engine.wake()

    def close(self) -> None:
        """See :meth:`Inference.close`. Environments that are answering are ended."""
        for episode in self._episodes.values():
            episode.runner.close()
        self._episodes.clear()
        self._close()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        self.engine.close()
