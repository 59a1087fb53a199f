"""Several rewards, one number: weights, errors, and each reward logged apart."""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from torchrl_grpo.data.example import Example
from torchrl_grpo.rewards.types import Reward, Scored

_log = logging.getLogger(__name__)


class RewardSet:
    """Rewards and their weights.

    Args:
        rewards: reward and weight; a weight of 0 logs a reward without counting it.
        on_error: what a reward that raises counts, before its weight.
        workers: completions scored at a time.
    """

    def __init__(
        self, rewards: Sequence[tuple[Reward, float]], on_error: float = 0.0, workers: int = 1
    ) -> None:
        assert len({reward.name for reward, _ in rewards}) == len(rewards), "reward names must differ"
        self._rewards = list(rewards)
        self._on_error = on_error
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(workers, "reward") if workers > 1 else None
        self.error_count = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The rewards' names, in the order of the weights."""
        return tuple(reward.name for reward, _ in self._rewards)

    @property
    def weights(self) -> tuple[float, ...]:
        """The rewards' weights, in the same order."""
        return tuple(weight for _, weight in self._rewards)

    def get(self, name: str) -> Reward | None:
        """The reward of that name, or None; it stays this set's to close."""
        return next((reward for reward, _ in self._rewards if reward.name == name), None)

    def score(self, completions: Sequence[str], examples: Sequence[Example]) -> list[Scored]:
        """Score completions, each against its own example.

        Args:
            completions: what the model wrote.
            examples: the problems, one for each completion.

        Returns:
            What each earned, in the same order. A reward that raises, or whose value is not a finite number,
            is named in ``errors``, logged with the completion, counted in :attr:`error_count`, and takes the
            value ``on_error``.

        Raises:
            ValueError: the two lengths differ.
        """
        if len(completions) != len(examples):
            raise ValueError(f"{len(completions)} completions but {len(examples)} examples")
        if self._threads is None:
            return [self._score(*pair) for pair in zip(completions, examples, strict=True)]
        return list(self._threads.map(self._score, completions, examples))

    def close(self) -> None:
        """Stop what the rewards started. It may be called twice."""
        if self._threads is not None:
            self._threads.shutdown()
        for reward, _ in self._rewards:
            close_all([reward])

    def _score(self, completion: str, example: Example) -> Scored:
        total = size = 0.0
        parts: dict[str, float] = {}
        errors: dict[str, str] = {}
        for reward, weight in self._rewards:
            try:
                value, named = _read(reward(completion, example))
            except Exception as error:  # noqa: BLE001  a reward is anybody's code; nothing is lost, see below
                value, named = self._on_error, {}
                errors[reward.name] = f"{type(error).__name__}: {error}"
                self._report(reward.name, errors[reward.name], completion, example)
            total += weight * value
            size += abs(weight * value)
            parts[reward.name] = value
            parts.update({f"{reward.name}/{part}": number for part, number in named.items()})
        # Of rewards that cancel rounding is left, and it would be the whole difference between two responses.
        if abs(total) < len(self._rewards) * sys.float_info.epsilon * size:
            total = 0.0
        return Scored(total, parts, errors)

    def _report(self, name: str, message: str, completion: str, example: Example) -> None:
        with self._lock:
            self.error_count += 1
        _log.warning(
            "reward %s failed on %s and counts %g: %s; completion: %s",
            name, example.id, self._on_error, message, excerpt(completion),
        )  # fmt: skip


def close_all(parts: Sequence[object]) -> None:
    """Close those that have something to close."""
    for part in parts:
        if hasattr(part, "close"):
            part.close()


def excerpt(completion: str) -> str:
    """The completion as it is logged: whole, unless it is very long."""
    if len(completion) <= 4_000:
        return repr(completion)
    return f"{completion[:2_000]!r} ... {completion[-2_000:]!r} ({len(completion)} characters)"


def _read(result: float | Mapping[str, float]) -> tuple[float, dict[str, float]]:
    """Split what a reward returned into its score and its other parts."""
    parts = dict(result) if isinstance(result, Mapping) else {"score": result}
    if "score" not in parts:
        raise ValueError(f"a reward's parts need a 'score', got {sorted(parts)}")
    numbers = {name: float(value) for name, value in parts.items()}
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}, not a finite number")
    return numbers.pop("score"), numbers
