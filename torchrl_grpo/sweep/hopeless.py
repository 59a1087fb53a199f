"""Which trials of a sweep are hopeless: their held-out intervals lie below that of one of the same seed."""

from __future__ import annotations

from collections.abc import Sequence

from torchrl_grpo.sweep.trials import UNFINISHED, Trial


def hopeless(trials: Sequence[Trial], evaluations: int) -> list[Trial]:
    """Return the unfinished trials that were below another one at each of their newest evaluations.

    Trials are compared at the same step, and with the same seed, so that a setting is not given up because of
    a bad seed.

    Args:
        trials: the trials.
        evaluations: number of evaluations in a row.
    """
    return [
        trial
        for trial in trials
        if trial.state == UNFINISHED
        and len(trial.steps) >= evaluations
        and all(_is_below(trial, at, trials) for at in range(-evaluations, 0))
    ]


def _is_below(trial: Trial, at: int, trials: Sequence[Trial]) -> bool:
    step, high = trial.steps[at], trial.bounds[at][1]
    lows = [
        other.bounds[other.steps.index(step)][0]
        for other in trials
        if other is not trial
        and (other.seed, other.metric) == (trial.seed, trial.metric)
        and step in other.steps
    ]
    return any(high < low for low in lows)
