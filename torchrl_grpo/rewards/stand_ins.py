"""What counts for a response that a judge or a reward model has failed on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torchrl_grpo.rewards.types import NoVerdict, Result, Verdict


def with_stand_ins(outcomes: Sequence[float | Verdict | str]) -> list[Result | Exception]:
    """Return outcomes of a group, in which each failure has the mean of the others to stand in.

    Args:
        outcomes: scores, verdicts, and messages of failures.
    """
    judged = [outcome for outcome in outcomes if not isinstance(outcome, str)]
    scores = [outcome.score if isinstance(outcome, Verdict) else outcome for outcome in judged]
    # The sum is the same in every order of the group.
    stand_in = math.fsum(scores) / len(scores) if scores else None
    return [NoVerdict(outcome, stand_in) if isinstance(outcome, str) else outcome for outcome in outcomes]


def one_of(outcomes: Sequence[Result | Exception]) -> Result:
    """Return the only one of outcomes.

    Raises:
        Exception: the outcome is one.
    """
    (outcome,) = outcomes
    if isinstance(outcome, Exception):
        raise outcome
    return outcome
