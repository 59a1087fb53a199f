"""Combine several weighted rewards into one number, and handle their errors."""

from __future__ import annotations

import itertools
import logging
import re
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from torchrl_grpo.data.example import Example
from torchrl_grpo.rewards.types import (
    BatchReward,
    JoinedReward,
    NoVerdict,
    ResponseScore,
    Result,
    Reward,
    Verdict,
    WaitingReward,
)
from torchrl_grpo.runtime.printable import printable

_log = logging.getLogger(__name__)
# Types of errors that a reward's process has passed on. The error of the reward follows.
_OF_PROCESSES = re.compile(r"^((JobFailed|JobError|JobTimeout|UserCodeError): )+")
# Largest size of a reward. Advantages are float32, which also holds weighted sums of such rewards.
_LARGEST = 1e30


class RewardSet:
    """Rewards and their weights.

    Args:
        rewards: pairs of reward and weight. A reward of weight 0 is logged only.
        on_error: unweighted value of a reward that raises. A :class:`~torchrl_grpo.rewards.types.NoVerdict`
            has its own.
        workers: number of calls of a reward that run in parallel, of all groups together, unless the reward
            says so itself. A call has one completion, or those of a group if the reward takes a batch, or of
            several groups if it allows that.
        group_size: number of responses in a group. Without it, neighbors with the same problem are a group.
        borrowed: names of rewards that are not closed with this set.
    """

    def __init__(
        self,
        rewards: Sequence[tuple[Reward, float]],
        on_error: float = 0.0,
        workers: int = 1,
        group_size: int | None = None,
        borrowed: Collection[str] = (),
    ) -> None:
        assert len({reward.name for reward, _ in rewards}) == len(rewards), "reward names must differ"
        self._rewards = list(rewards)
        self._on_error = on_error
        self._group_size = group_size
        self._borrowed = borrowed
        self._lock = threading.Lock()
        self._workers = workers
        self._own_threads = {
            reward.name: ThreadPoolExecutor(reward.parallel_calls, reward.name)
            for reward, _ in rewards
            if isinstance(reward, WaitingReward)
        }
        # Beside one that waits, several groups are scored at a time, and the others get one call at a time.
        needs_threads = workers > 1 or bool(self._own_threads)
        self._threads = ThreadPoolExecutor(workers, "reward") if needs_threads else None
        self.error_count = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the rewards, in the order in which the constructor got them."""
        return tuple(reward.name for reward, _ in self._rewards)

    @property
    def weights(self) -> tuple[float, ...]:
        """Weights of the rewards, in the same order as :attr:`names`."""
        return tuple(weight for _, weight in self._rewards)

    @property
    def parallel_calls(self) -> int:
        """Number of groups that should be scored at a time.

        So many keep every worker busy, also if a call has a whole group, and a call that hangs holds up its
        own group alone. A single worker gets one call after the other: a reward may have a state. Beside a
        reward that waits, such as a judge, they come in the order in which the rewards before it have ended.
        """
        own = [reward.parallel_calls for reward, _ in self._rewards if isinstance(reward, WaitingReward)]
        return max([self._workers, *own])

    @property
    def groups_per_call(self) -> int:
        """Largest number of groups that a reward takes in a call."""
        joined = (reward.prompts_per_call for reward, _ in self._rewards if isinstance(reward, JoinedReward))
        return max(joined, default=1)

    def get(self, name: str) -> Reward | None:
        """Return the reward of that name, or None. This set still owns and closes it."""
        return next((reward for reward, _ in self._rewards if reward.name == name), None)

    def score(self, completions: Sequence[str], examples: Sequence[Example]) -> list[ResponseScore]:
        """Score each completion against its own example.

        Args:
            completions: texts that the model wrote.
            examples: problems, one for each completion.

        Returns:
            The scores, in the same order. A reward that raises, or returns a number that is not finite or
            above 1e30, counts as ``on_error``, or as :class:`~torchrl_grpo.rewards.types.NoVerdict` says. Its
            error is in ``errors``, is logged with the completion, and is counted in :attr:`error_count`.

        Raises:
            ValueError: the two lengths differ.
        """
        if len(completions) != len(examples):
            raise ValueError(f"{len(completions)} completions but {len(examples)} examples")
        outcomes = [self._outcomes(reward, completions, examples) for reward, _ in self._rewards]
        rows = zip(*outcomes, strict=True) if outcomes else [()] * len(completions)
        return [self._sum(*row) for row in zip(completions, examples, rows, strict=True)]

    def close(self) -> None:
        """Close the rewards. It may be called twice."""
        if self._threads is not None:
            self._threads.shutdown()
        # A call that waits for somebody else ends when its reward is closed, here or by its owner.
        for threads in self._own_threads.values():
            threads.shutdown(wait=False, cancel_futures=True)
        close_all([reward for reward, _ in self._rewards if reward.name not in self._borrowed])

    def _outcomes(
        self, reward: Reward, completions: Sequence[str], examples: Sequence[Example]
    ) -> list[Result | Exception]:
        """Return for each completion what the reward returned, or the error that it raised."""

        def score(groups: list[list[int]]) -> list[Result | Exception]:
            rows = [row for group in groups for row in group]
            try:
                if isinstance(reward, BatchReward):
                    texts, problems = [completions[row] for row in rows], [examples[row] for row in rows]
                    return list(reward.score_batch(texts, problems))
                return [reward(completions[row], examples[row]) for row in rows]
            except Exception as error:  # noqa: BLE001  a reward may be user code; the error is reported later
                if len(groups) > 1:
                    # A timeout or an error costs only the group that it comes from.
                    _log.warning(
                        "reward %s failed on %d prompts in one call, and is repeated for each of them: %s",
                        reward.name, len(groups), error_text(error), extra={"fold": f"reward {reward.name}"},
                    )  # fmt: skip
                    return [outcome for group in groups for outcome in score([group])]
                return [error] * len(rows)

        numbers = range(len(completions))
        groups, joined = [[number] for number in numbers], 1
        if isinstance(reward, BatchReward):
            # One call for each group. A timeout or an error then costs only that group, and a reward that
            # compares the texts of a call compares responses to one prompt.
            same_problem = (
                list(rows) for _, rows in itertools.groupby(numbers, lambda row: examples[row].id)
            )
            # Two neighboring groups may have the same problem.
            size = self._group_size or max(1, len(completions))
            groups = [rows[at : at + size] for rows in same_problem for at in range(0, len(rows), size)]
        if isinstance(reward, JoinedReward):
            # Every worker gets a part.
            joined = max(1, min(reward.prompts_per_call, -(-len(groups) // self._workers)))
        calls = [groups[at : at + joined] for at in range(0, len(groups), joined)]
        threads = self._own_threads.get(reward.name, self._threads)
        results = map(score, calls) if threads is None else threads.map(score, calls)
        return [outcome for outcomes in results for outcome in outcomes]

    def _sum(
        self, completion: str, example: Example, outcomes: Sequence[Result | Exception]
    ) -> ResponseScore:
        total = size = 0.0
        parts: dict[str, float] = {}
        errors: dict[str, str] = {}
        verdicts: dict[str, str] = {}
        for (reward, weight), outcome in zip(self._rewards, outcomes, strict=True):
            try:
                value, named = read_result(outcome)
                if isinstance(outcome, Verdict):
                    verdicts[reward.name] = outcome.text
            except Exception as error:  # noqa: BLE001  of the reward, which may be user code; reported below
                stands_for = error.stand_in if isinstance(error, NoVerdict) else self._on_error
                errors[reward.name] = error_text(error)
                self._report(reward.name, errors[reward.name], stands_for, completion, example)
                if stands_for is None:
                    continue
                value, named = stands_for, {}
            total += weight * value
            size += abs(weight * value)
            parts[reward.name] = value
            parts.update({f"{reward.name}/{component}": number for component, number in named.items()})
        # Rewards that cancel out leave a rounding error, which could be the only difference in a group.
        if abs(total) < len(self._rewards) * sys.float_info.epsilon * size:
            total = 0.0
        return ResponseScore(total, parts, errors, verdicts)

    def _report(
        self, name: str, message: str, stands_for: float | None, completion: str, example: Example
    ) -> None:
        with self._lock:
            self.error_count += 1
        _log.warning(
            "reward %s failed on %s and %s: %s; completion: %s",
            name, example.id, "does not count" if stands_for is None else f"counts as {stands_for:g}",
            message, excerpt(completion), extra={"fold": f"reward {name}"},
        )  # fmt: skip


class MixtureRewardSet:
    """The rewards of a mixture of data sets (``env.mixture``).

    Each problem is scored by the rewards of the part of the mixture that it comes from. In the scores a
    reward is called ``<part>/<name>``.

    Args:
        sets: rewards of each part of the mixture, by the part's name.
    """

    def __init__(self, sets: Mapping[str, RewardSet]) -> None:
        self.sets = dict(sets)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all rewards, part by part."""
        return tuple(f"{dataset}/{name}" for dataset, rewards in self.sets.items() for name in rewards.names)

    @property
    def weights(self) -> tuple[float, ...]:
        """Weights of the rewards, in the order of the names."""
        return tuple(weight for rewards in self.sets.values() for weight in rewards.weights)

    @property
    def parallel_calls(self) -> int:
        """See :attr:`RewardSet.parallel_calls`."""
        return max(rewards.parallel_calls for rewards in self.sets.values())

    @property
    def groups_per_call(self) -> int:
        """See :attr:`RewardSet.groups_per_call`."""
        return max(rewards.groups_per_call for rewards in self.sets.values())

    @property
    def error_count(self) -> int:
        """Number of reward evaluations that failed."""
        return sum(rewards.error_count for rewards in self.sets.values())

    def score(self, completions: Sequence[str], examples: Sequence[Example]) -> list[ResponseScore]:
        """Score each completion by the rewards of its example's part. See :meth:`RewardSet.score`."""
        if len(completions) != len(examples):
            raise ValueError(f"{len(completions)} completions but {len(examples)} examples")
        scores: dict[int, ResponseScore] = {}
        for dataset, rewards in self.sets.items():
            rows = [row for row, example in enumerate(examples) if example.part == dataset]
            part_scores = rewards.score([completions[row] for row in rows], [examples[row] for row in rows])
            for row, score in zip(rows, part_scores, strict=True):
                scores[row] = ResponseScore(
                    score.total,
                    {f"{dataset}/{name}": value for name, value in score.parts.items()},
                    {f"{dataset}/{name}": message for name, message in score.errors.items()},
                    {f"{dataset}/{name}": text for name, text in score.verdicts.items()},
                )
        return [scores[row] for row in range(len(examples))]

    def close(self) -> None:
        """Close the rewards. It may be called twice."""
        for rewards in self.sets.values():
            rewards.close()


def close_all(parts: Sequence[object]) -> None:
    """Close the objects that have a ``close`` method."""
    for part in parts:
        if hasattr(part, "close"):
            part.close()


def error_text(error: Exception) -> str:
    """Return type and message of an error, which may repeat what a model has written."""
    return printable(_OF_PROCESSES.sub("", f"{type(error).__name__}: {error}"))[:2_000]


def excerpt(completion: str) -> str:
    """Return the completion for the log: whole, or its two ends if it is longer than 4,000 characters."""
    if len(completion) <= 4_000:
        return repr(completion)
    return f"{completion[:2_000]!r} ... {completion[-2_000:]!r} ({len(completion)} characters)"


def read_result(result: Result | Exception) -> tuple[float, dict[str, float]]:
    """Split the result of a reward into its score and its components.

    Raises:
        Exception: ``result`` is an exception, or has something else than numbers up to 1e30 in size.
    """
    if isinstance(result, Exception):
        raise result
    if isinstance(result, Verdict):
        result = {**result.components, "score": result.score}
    parts = dict(result) if isinstance(result, Mapping) else {"score": result}
    if "score" not in parts:
        raise ValueError(f"the result of a reward needs a 'score', got {sorted(parts)}")
    if None in parts.values():
        raise TypeError("it returned None, not a number; is a return statement missing?")
    numbers = {name: float(value) for name, value in parts.items()}
    for name, value in numbers.items():
        if not abs(value) <= _LARGEST:
            raise ValueError(f"{name} is {value}, not a finite number of a size up to {_LARGEST:g}")
    return numbers.pop("score"), numbers
