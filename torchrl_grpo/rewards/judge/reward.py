"""The reward of a judge: scores of single responses, or the order of the responses of a group."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torchrl_grpo.config import Config
from torchrl_grpo.config.judges import CACHE_OF_RUN, JudgeConfig, JudgeMode, judge_config, reward_gpu
from torchrl_grpo.data.control_texts import USUAL
from torchrl_grpo.data.example import Example
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.rewards.judge import question
from torchrl_grpo.rewards.judge.endpoint import Endpoint, JudgeError, result
from torchrl_grpo.rewards.judge.server import JudgeServer
from torchrl_grpo.rewards.judge.verdicts import Verdicts
from torchrl_grpo.rewards.stand_ins import one_of, with_stand_ins
from torchrl_grpo.rewards.types import NoVerdict, Result, Verdict
from torchrl_grpo.runtime.paths import expanded

_T = TypeVar("_T")
_FOLDER = "judge"


class _Judge(ABC):
    """What both modes share: the endpoint, and the verdicts that are known.

    Args:
        name: name of the reward.
        args: arguments of the judge.
        key: the endpoint's key.
        folder: folder of the verdicts; None to keep them in memory. Without a cache none is kept.
        server: the judge's own server, closed with it; None if the arguments have an address.
    """

    def __init__(
        self,
        name: str,
        args: JudgeConfig,
        key: str | None,
        folder: Path | None,
        server: JudgeServer | None = None,
    ) -> None:
        self.name, self.parallel_calls = name, args.concurrency
        self._args = args
        self._verdicts = None if args.cache is None else Verdicts(folder, own=args.cache != CACHE_OF_RUN)
        self._server = server
        self._endpoint = Endpoint(args, key) if server is None else Endpoint(args, server.key, server.address)
        self._control = USUAL if server is None else server.control
        self._lock = threading.Lock()
        # Requests under way, by key: what several groups ask for is asked for once.
        self._asked: dict[str, Future[Any]] = {}

    @abstractmethod
    def score_batch(
        self, completions: Sequence[str], examples: Sequence[Example]
    ) -> Sequence[Result | Exception]:
        """Judge the responses of a group."""

    def __call__(self, completion: str, example: Example) -> Result:
        """Judge a response alone.

        Raises:
            NoVerdict: the judge failed.
        """
        return one_of(self.score_batch([completion], [example]))

    def close(self) -> None:
        """End requests under way, and close the files."""
        self._endpoint.close()
        if self._verdicts is not None:
            self._verdicts.close()
        if self._server is not None:
            self._server.close()

    def _ask(self, messages: list[dict[str, str]], read: Callable[[str], _T]) -> Future[tuple[str, _T]]:
        """Ask, unless the answer is known or under way, and return the future of it and its verdict."""
        body: dict[str, Any] = {"temperature": 0, "max_tokens": 1024, **self._args.request}
        body = {name: value for name, value in body.items() if value is not None}
        body |= {"model": self._args.model, "messages": messages}
        if (verdicts := self._verdicts) is None:
            return self._endpoint.ask(body, read)
        # An endpoint may get another address, and is known by the name of its model.
        question_text = json.dumps([body, self._server and self._server.identity], sort_keys=True)
        key = hashlib.sha256(question_text.encode()).hexdigest()

        def keep(answer: str) -> _T:
            verdict = read(answer)
            verdicts.add(key, answer)
            return verdict

        with self._lock:
            if (future := self._asked.get(key)) is None:
                future = _known(verdicts.get(key), read) or self._endpoint.ask(body, keep)
                self._asked[key] = future
        future.add_done_callback(lambda _: self._asked.pop(key, None))
        return future


def _known(answer: str | None, read: Callable[[str], _T]) -> Future[tuple[str, _T]] | None:
    if answer is None:
        return None
    future: Future[tuple[str, _T]] = Future()
    try:
        future.set_result((answer, read(answer)))
    except question.BadVerdict:
        # Somebody has changed the file, so the judge is asked again.
        return None
    return future


class ScoringJudge(_Judge):
    """Scores each response in a request of its own; see :class:`_Judge`."""

    def score_batch(
        self, completions: Sequence[str], examples: Sequence[Example]
    ) -> list[Result | Exception]:
        """Score the responses of a group. Of those that the judge fails on, the others' mean stands in."""
        read = partial(question.read_scores, self._args)
        ask = partial(question.absolute, self._args, control=self._control)
        futures = [
            self._ask(ask(example, question.visible(completion)), read)
            for completion, example in zip(completions, examples, strict=True)
        ]
        return with_stand_ins([self._verdict(future) for future in futures])

    def _verdict(self, future: Future[tuple[str, dict[str, float]]]) -> Verdict | str:
        try:
            answer, scores = result(future)
        except JudgeError as error:
            return str(error)
        values = question.scaled(self._args, scores)
        return Verdict(question.mean([*values.values()]), answer, values if self._args.criteria else {})


class RankingJudge(_Judge):
    """Orders the responses of a group in one request; see :class:`_Judge`."""

    def score_batch(
        self, completions: Sequence[str], examples: Sequence[Example]
    ) -> list[Result | Exception]:
        """Return for each response the share of the others that it beats. Equal responses are shown once.

        Raises:
            NoVerdict: the judge failed.
        """
        responses = [question.visible(completion) for completion in completions]
        different = list(dict.fromkeys(responses))
        if len(different) == 1:
            return [Verdict(0.5, "all responses are the same") for _ in responses]
        order = question.shown(examples[0], different)
        messages = question.ranking(self._args, examples[0], different, self._control)
        try:
            answer, shares = result(self._ask(messages, partial(question.read_ranking, count=len(different))))
        except JudgeError as error:
            raise NoVerdict(str(error)) from error
        strength = {different[number]: share for number, share in zip(order, shares, strict=True)}
        beaten = [
            sum(
                (strength[other] < strength[own]) + (strength[other] == strength[own]) / 2
                for other in responses
            )
            for own in responses
        ]
        # Each is equal to itself.
        return [Verdict((count - 0.5) / (len(responses) - 1), answer) for count in beaten]


def build(cfg: Config, name: str, run_folder: Path | None) -> ScoringJudge | RankingJudge:
    """Build the reward, and start its server if it has one. No request is sent.

    Args:
        cfg: configuration; ``reward.args`` is read.
        name: name of the reward.
        run_folder: folder of the run; None without one.

    Raises:
        ConfigError: an argument is wrong, the variable with the key is not set, or the server does not start.
    """
    args, key = judge_config(cfg, name), None
    if args.key_variable is not None and not (key := os.environ.get(args.key_variable, "").strip()):
        raise ConfigError(
            f"reward.args.{name}.key_variable={args.key_variable}: this environment variable is not set; set "
            "it to the endpoint's key, or write key_variable=null for an endpoint that needs none"
        )
    folder = None if args.cache is None else expanded(args.cache)
    if args.cache == CACHE_OF_RUN:
        folder = None if run_folder is None else run_folder / _FOLDER
    kind = RankingJudge if args.mode == JudgeMode.ranking else ScoringJudge
    server = None
    if args.device is not None:
        where = f"reward.args.{name}.device={args.device}"
        server = JudgeServer(where, args.model, reward_gpu(cfg, name), args.engine_args)
    return kind(name, args, key, folder, server)
