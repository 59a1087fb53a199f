"""Data classes of a group: a prompt with its responses, unfinished, finished or scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchrl_grpo.data.episode import EpisodeRecord
from torchrl_grpo.data.example import Example
from torchrl_grpo.inference.protocol import Completion, PromptPictures
from torchrl_grpo.rewards.types import ResponseScore

# Fields of each response that have a number for each token, and what an array of them has.
OF_TOKENS = {"token_ids": np.int64, "log_probs": np.float64, "versions": np.int64, "sampled": np.bool_}
# Of each of G responses, the log-probabilities of its T tokens under the reference model or the teacher. With
# policy.distill_top_k=K, K x T candidates and their K x T log-probabilities follow.
ReferenceLogProbs = list[list[float]]


@dataclass
class Response:
    """One response, finished or not, with the version of the weights that sampled each of its tokens.

    Attributes:
        token_ids: tokens so far.
        log_probs: log-probability of each token under the distribution it was sampled from.
        versions: number of optimizer steps that produced the sampling weights, token by token.
        finish_reason: ``"stop"``, ``"length"``, or None while it is not finished.
        sampled: for each token, whether the model sampled it: see
            :class:`~torchrl_grpo.inference.protocol.Completion`. A checkpoint from before episodes lacks it.
        record: record of a finished episode; None for a response of one turn.
    """

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    sampled: list[bool] = field(default_factory=list)
    record: EpisodeRecord | None = None

    def __post_init__(self) -> None:
        """Complete a response of an older checkpoint: all its tokens are sampled."""
        if not self.sampled:
            self.sampled = [True] * len(self.token_ids)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle numbers as bytes, which a trainer of many workers reads in half the time of lists."""
        rows = {name: _to_bytes(getattr(self, name), kind) for name, kind in OF_TOKENS.items()}
        return _response, (rows, self.finish_reason, self.record)

    def extend(self, more: Completion, version: int) -> None:
        """Append what weights of ``version`` have generated."""
        self.token_ids += more.token_ids
        self.log_probs += more.log_probs
        self.versions += [version] * len(more.token_ids)
        self.sampled += [True] * len(more.token_ids) if more.sampled is None else more.sampled
        self.record = more.record
        self.finish_reason = None if more.finish_reason == "aborted" else more.finish_reason


def _to_bytes(row: Sequence[float], kind: type[np.generic]) -> tuple[bytes, int]:
    """Return numbers as bytes, and how often these repeat: all tokens often have the same version."""
    repeats = kind is not np.float64 and len(row) > 0 and row.count(row[0]) == len(row)
    values, times = (row[:1], len(row)) if repeats else (row, 1)
    return np.fromiter(values, kind, len(values)).tobytes(), times


def _response(
    rows: dict[str, tuple[bytes, int]], finish_reason: str | None, record: EpisodeRecord | None
) -> Response:
    """Undo :meth:`Response.__reduce__`."""
    lists = {
        name: np.frombuffer(data, OF_TOKENS[name]).tolist() * times for name, (data, times) in rows.items()
    }
    return Response(**lists, finish_reason=finish_reason, record=record)


@dataclass
class Group:
    """One prompt and its G responses.

    Attributes:
        group_id: running number of the prompt, from which the prompt and the sampling seeds follow.
        prompt: token ids.
        seed: seed of the sampling; a response's number is added to it.
        responses: G responses.
        problem: the problem, if the responses are episodes of several turns, which an environment starts with
            it; otherwise None.
        teacher_prompt: token ids that a teacher reads in place of ``prompt``; None for the same.
        pictures: pictures of the prompt; None for a model of text. A checkpoint leaves them out, because they
            follow from the group's number.
    """

    group_id: int
    prompt: list[int]
    seed: int
    responses: list[Response]
    problem: Example | None = None
    teacher_prompt: list[int] | None = None
    pictures: PromptPictures | None = None

    @property
    def is_finished(self) -> bool:
        """Whether every response has ended."""
        return all(response.finish_reason is not None for response in self.responses)

    @property
    def oldest_version(self) -> int | None:
        """The smallest version among all tokens; None before the first token."""
        return min(
            (min(set(response.versions)) for response in self.responses if response.versions), default=None
        )


@dataclass
class ScoredGroup:
    """A finished group with its rewards.

    Attributes:
        group: the responses.
        texts: texts of the responses.
        scores: rewards of the G responses.
        reference: numbers of the reference model or the teacher, one list per response; None if the trainer
            computes them.
    """

    group: Group
    texts: list[str]
    scores: list[ResponseScore]
    reference: ReferenceLogProbs | None = None
