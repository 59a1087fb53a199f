"""How old the policy behind a round is."""

from __future__ import annotations

from collections import Counter

from tensordict import TensorDict


def ages(groups: TensorDict, step: int, steps_per_round: int) -> dict[str, float]:
    """How old the policy of each response was when its round came to the trainer.

    Args:
        groups: ``[P]``, see :mod:`torchrl_grpo.batch.schema`.
        step: optimizer steps done before the round.
        steps_per_round: what a round counts for: an age of 1 is one round.

    Returns:
        ``policy/age_mean`` and ``policy/age_max`` of the oldest token of each response, ``policy/age_<n>``
        the share of responses of that age, and ``policy/mixed`` the share with tokens of several versions.
    """
    oldest = groups["policy_version"].flatten().tolist()
    newest = groups["newest_policy_version"].flatten().tolist()
    found = [step // steps_per_round - version // steps_per_round for version in oldest]
    counts = Counter(found)
    return {
        "policy/age_mean": sum(found) / len(found),
        "policy/age_max": max(found),
        **{f"policy/age_{age}": counts[age] / len(found) for age in sorted(counts)},
        "policy/mixed": sum(a != b for a, b in zip(oldest, newest, strict=True)) / len(found),
    }
