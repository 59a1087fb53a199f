"""Derives seeds from names alone, so that no seed depends on what ran before."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *names: object) -> int:
    """Derive a 48-bit seed from ``seed`` and ``names``; engines add the number of the sample to it."""
    digest = hashlib.blake2b("/".join(map(str, (seed, *names))).encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")


def group_seed(seed: int, group_id: int, groups_per_round: int) -> int:
    """Derive the sampling seed of a group from the seed of the run, its round, and its place in the round."""
    return derive_seed(seed, "rollout", *divmod(group_id, groups_per_round))
