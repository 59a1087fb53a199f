"""A round as rows of ``rollouts.jsonl``."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase

from torchrl_grpo.rollout.collector import Round

_NAMES = ("prompt", "response", "reward", "rewards", "advantage", "policy_version", "errors", "group_id")


def rollout_rows(round_: Round, groups: TensorDictBase) -> list[dict[str, Any]]:
    """One row for each of the P x G responses, group by group.

    Args:
        round_: texts, named rewards and their errors.
        groups: the same responses as they stand in the buffer, advantages included.
    """
    samples = groups["advantage"].shape[1]
    columns = zip(
        [text for text in round_.prompts for _ in range(samples)],
        [text for group in round_.responses for text in group],
        groups["next", "reward"].flatten().tolist(),
        round_.parts,
        groups["advantage"].flatten().tolist(),
        groups["policy_version"].flatten().tolist(),
        round_.errors,
        groups["group_id"].flatten().tolist(),
        strict=True,
    )
    return [dict(zip(_NAMES, column, strict=True)) for column in columns]
