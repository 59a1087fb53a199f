"""Seeds that depend on names and on nothing that ran before."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *names: object) -> int:
    """A 48-bit seed that depends on ``seed`` and ``names``; engines add the sample's number to it."""
    digest = hashlib.blake2b("/".join(map(str, (seed, *names))).encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")


def group_seed(seed: int, group_id: int, groups_per_round: int) -> int:
    """Of the sampling of a group, by the run's seed and the group's number alone."""
    return derive_seed(seed, "rollout", *divmod(group_id, groups_per_round))
