"""Dynamic sampling: rounds are collected until enough groups can teach something."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tensordict import TensorDict
from torch import Tensor

from torchrl_grpo.batch.schema import collate
from torchrl_grpo.rollout.round import Round


class Collector(Protocol):
    """Collects rounds."""

    def rollout(self, again: bool = False) -> Round:
        """The next round. With ``again`` it refills the previous one, and is no training round of its own."""


def collect_with_signal(
    collector: Collector, without_signal: Callable[[TensorDict], Tensor], max_refills: int
) -> tuple[Round, dict[str, float]]:
    """Collect a round, and further ones until it is full of groups whose rewards differ (DAPO, arXiv
    2503.14476, eq. 11).

    Groups are taken in the order they were sampled. Groups beyond a full round are thrown away. If
    ``max_refills`` further rounds do not suffice, groups without a signal fill the rest.

    Args:
        collector: collector of the rounds.
        without_signal: ``[P]`` bool of a round's groups.
        max_refills: further rounds at most; 0 takes the first as it is.

    Returns:
        One round of the usual size, and the metric ``rollout/refills`` unless ``max_refills`` is 0.
    """
    rounds = [collector.rollout()]
    if max_refills == 0:
        return rounds[0], {}
    size = len(rounds[0].prompts)
    found: list[tuple[int, int]] = []
    spare: list[tuple[int, int]] = []

    def sort(number: int) -> None:
        for group, flat in enumerate(without_signal(rounds[number].groups).tolist()):
            (spare if flat else found).append((number, group))

    sort(0)
    while len(found) < size and len(rounds) <= max_refills:
        rounds.append(collector.rollout(again=True))
        sort(len(rounds) - 1)
    chosen = (found + spare)[:size]
    return _pick(rounds, chosen), {"rollout/refills": len(rounds) - 1}


def _pick(rounds: Sequence[Round], chosen: Sequence[tuple[int, int]]) -> Round:
    """One round of the groups named by round and position. Its sums are those of all rounds together."""
    samples = rounds[0].groups["group_id"].shape[1]

    responses = [
        (number, row) for number, group in chosen for row in range(group * samples, (group + 1) * samples)
    ]
    return Round(
        groups=collate([rounds[number].groups[group] for number, group in chosen]),
        prompts=[rounds[number].prompts[group] for number, group in chosen],
        responses=[rounds[number].responses[group] for number, group in chosen],
        parts=[rounds[number].parts[row] for number, row in responses],
        errors=[rounds[number].errors[row] for number, row in responses],
        response_tokens=sum(one.response_tokens for one in rounds),
        error_count=sum(one.error_count for one in rounds),
        seconds={phase: sum(one.seconds[phase] for one in rounds) for phase in rounds[0].seconds},
    )
