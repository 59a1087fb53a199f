"""Dynamic sampling: collects rounds until enough groups have rewards that differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tensordict import TensorDictBase, lazy_stack
from torch import Tensor

from torchrl_grpo.rollout.round import Round


def collect_with_signal(
    rollout: Callable[[bool], Round],
    no_signal_mask: Callable[[TensorDictBase], Tensor],
    max_refills: int,
    observe: Callable[[Round], object] = lambda _: None,
    discard: Callable[[Round, list[str]], object] = lambda round_, reasons: None,
) -> tuple[Round, dict[str, float]]:
    """Collect a round, and further ones until it is full of groups whose rewards differ (DAPO, arXiv
    2503.14476, eq. 11).

    Such groups have a signal. They are taken in the order they were sampled, and those beyond a full round
    are thrown away. If ``max_refills`` further rounds do not suffice, groups without a signal fill the rest.

    Args:
        rollout: function that collects a round; with True as a refill, which does not count as a training
            round (``Collector.rollout``).
        no_signal_mask: function that returns bools ``[P]`` for the P groups of a round, True for those
            without a signal.
        max_refills: largest number of further rounds; 0 returns the first round unchanged.
        observe: function that is called with each collected round, groups that are thrown away included, once
            all are collected.
        discard: function that gets the groups that are thrown away, and why each is.

    Returns:
        One round of the usual size, and the metric ``rollout/refills`` unless ``max_refills`` is 0.
    """
    rounds = [rollout(False)]
    if max_refills == 0:
        observe(rounds[0])
        return rounds[0], {}
    size = len(rounds[0].prompts)
    with_signal: list[tuple[int, int]] = []
    without_signal: list[tuple[int, int]] = []

    def classify(number: int) -> None:
        for group, lacks_signal in enumerate(no_signal_mask(rounds[number].groups).tolist()):
            (without_signal if lacks_signal else with_signal).append((number, group))

    classify(0)
    while len(with_signal) < size and len(rounds) <= max_refills:
        rounds.append(rollout(True))
        classify(len(rounds) - 1)
    for collected in rounds:
        observe(collected)
    chosen = (with_signal + without_signal)[:size]
    if left := (with_signal + without_signal)[size:]:
        reasons = [
            "the round was full" if group in set(with_signal) else "all rewards are equal" for group in left
        ]
        discard(_assemble_round(rounds, left), reasons)
    return _assemble_round(rounds, chosen), {"rollout/refills": len(rounds) - 1}


def _assemble_round(rounds: Sequence[Round], chosen: Sequence[tuple[int, int]]) -> Round:
    """Assemble a round from groups given as (round, position).

    Token counts, error counts and times are summed over all rounds.
    """
    samples = rounds[0].groups["group_id"].shape[1]

    rows = [
        (number, row) for number, group in chosen for row in range(group * samples, (group + 1) * samples)
    ]
    return Round(
        groups=lazy_stack([rounds[number].groups[group] for number, group in chosen]),
        prompts=[rounds[number].prompts[group] for number, group in chosen],
        responses=[rounds[number].responses[group] for number, group in chosen],
        rewards_by_name=[rounds[number].rewards_by_name[row] for number, row in rows],
        errors=[rounds[number].errors[row] for number, row in rows],
        verdicts=[rounds[number].verdicts[row] for number, row in rows],
        response_tokens=sum(round_.response_tokens for round_ in rounds),
        error_count=sum(round_.error_count for round_ in rounds),
        records=[rounds[number].records[row] for number, row in rows if rounds[number].records],
        seconds={phase: sum(round_.seconds[phase] for round_ in rounds) for phase in rounds[0].seconds},
    )
