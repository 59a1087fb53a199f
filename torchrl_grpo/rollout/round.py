"""Builds a round from finished groups, for both collectors, and computes what is logged about it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from torchrl_grpo.batch.schema import PICTURE_KEYS, build_batch, sampled_counts
from torchrl_grpo.data.episode import EpisodeRecord
from torchrl_grpo.data.example import Example
from torchrl_grpo.data.pictures import by_name
from torchrl_grpo.envs.group_text import GroupTextEnv
from torchrl_grpo.envs.responses import judged_texts, written_texts
from torchrl_grpo.errors import TrainingStopped
from torchrl_grpo.models.scoring.padding import pad_right, split_files
from torchrl_grpo.rollout.groups import Group, ScoredGroup
from torchrl_grpo.rollout.log_prob_transform import (
    CANDIDATE_LOG_PROBS,
    CANDIDATES,
    TEACHER_PROMPT,
    TEACHER_PROMPT_MASK,
)

_ROLLOUT_FIELDS = (
    "prompt",
    "response",
    "reward",
    "rewards",
    "advantage",
    "policy_version",
    "errors",
    "group_id",
    "length",
    "truncated",
)


@dataclass
class Round:
    """One round of collection.

    Attributes:
        groups: see :mod:`torchrl_grpo.batch.schema`.
        prompts: texts of P prompts.
        responses: texts of G responses for each prompt.
        rewards_by_name: rewards and their components by name: P x G dictionaries, group by group.
        errors: reward errors by name: P x G dictionaries, group by group.
        verdicts: words of judges by name: P x G dictionaries, group by group.
        response_tokens: number of sampled tokens. Refill rounds and the groups discarded from them are
            included; groups dropped as too old are not.
        error_count: reward errors of the same responses.
        records: records of the P x G responses, if they are episodes of several turns; otherwise empty.
        seconds: seconds that the trainer spent on each phase of the round, by metric name.
    """

    groups: TensorDictBase
    prompts: list[str]
    responses: list[list[str]]
    rewards_by_name: list[dict[str, float]]
    errors: list[dict[str, str]]
    verdicts: list[dict[str, str]]
    response_tokens: int
    error_count: int
    records: list[EpisodeRecord]
    seconds: dict[str, float]


def score_groups(
    env: GroupTextEnv,
    tokenizer: PreTrainedTokenizerBase,
    *,
    groups: Sequence[Group],
    examples: Sequence[Example],
) -> list[ScoredGroup]:
    """Decode and reward finished groups, all responses in one call of the reward set.

    Args:
        env: environment that gives the rewards.
        tokenizer: tokenizer that turns responses into text.
        groups: groups whose responses have all ended.
        examples: problem of each group.
    """
    responses = [response for group in groups for response in group.responses]
    texts = written_texts(tokenizer, responses)
    prompts = [group.prompt for group in groups for _ in group.responses]
    problems = [
        example for group, example in zip(groups, examples, strict=True) for _ in range(len(group.responses))
    ]
    scores = env.score(judged_texts(tokenizer, responses, prompts, texts), problems)
    scored_groups, start = [], 0
    for group in groups:
        end = start + len(group.responses)
        scored_groups.append(ScoredGroup(group, texts[start:end], scores[start:end]))
        start = end
    return scored_groups


def build_round(
    groups: Sequence[ScoredGroup],
    prompts: Sequence[str],
    *,
    reward_names: Sequence[str],
    pad_token_id: int,
    seconds: dict[str, float],
) -> Round:
    """Put P scored groups of G responses together.

    Args:
        groups: the groups, in the order of the round.
        prompts: text of each group's prompt.
        reward_names: rewards that get a place in ``("next", "reward_parts")``, in this order. Their
            components are only in :attr:`Round.rewards_by_name`.
        pad_token_id: token that fills the padding.
        seconds: see :class:`Round`.
    """
    shape = len(groups), len(groups[0].scores)
    scores = [score for scored in groups for score in scored.scores]
    responses = [scored.group.responses for scored in groups]
    pictures = [scored.group.pictures for scored in groups]
    # What failed on a whole group is equal for all of it, so that it has no influence.
    rewards = [
        [score.parts.get(name, 0.0 if name in score.errors else math.nan) for name in reward_names]
        for score in scores
    ]
    batch = build_batch(
        [scored.group.prompt for scored in groups],
        responses,
        torch.tensor([score.total for score in scores], dtype=torch.float64).view(*shape, 1),
        torch.tensor(rewards, dtype=torch.float64).view(*shape, -1),
        torch.tensor([scored.group.group_id for scored in groups])[:, None].repeat(1, shape[1]),
        [[response.versions for response in siblings] for siblings in responses],
        pad_token_id,
        None if pictures[0] is None else [each.files if each else () for each in pictures],
    )
    count = _num_candidates(groups)
    for group, scored in zip(batch.unbind(0), groups, strict=True):
        prompt = scored.group.teacher_prompt
        if scored.reference is not None:
            _set_reference(group, scored.reference, count)
        elif prompt is not None:
            group[TEACHER_PROMPT] = torch.tensor(prompt, dtype=torch.int64)
            group[TEACHER_PROMPT_MASK] = torch.ones(len(prompt), dtype=torch.bool)
    return Round(
        groups=batch,
        prompts=list(prompts),
        responses=[scored.texts for scored in groups],
        rewards_by_name=[dict(score.parts) for score in scores],
        errors=[dict(score.errors) for score in scores],
        verdicts=[dict(score.verdicts) for score in scores],
        response_tokens=int(sampled_counts(batch).sum()),
        error_count=sum(len(score.errors) for score in scores),
        records=[
            response.record for siblings in responses for response in siblings if response.record is not None
        ],
        seconds=seconds,
    )


def _num_candidates(groups: Sequence[ScoredGroup]) -> int:
    """Return the number of a teacher's candidates for each token; 0 if it has none."""
    for scored in groups:
        for row, response in zip(scored.reference or (), scored.group.responses, strict=False):
            if response.token_ids:
                return len(row) // len(response.token_ids) // 2
    return 0


def _set_reference(group: TensorDictBase, rows: Sequence[Sequence[float]], count: int) -> None:
    """Put the numbers of the reference or teacher into a group, see :data:`~.groups.ReferenceLogProbs`."""
    G, T = group["masks", "response"].shape
    lengths = group["masks", "response"].sum(-1).tolist()
    log_probs = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    group["log_probs", "reference"], _ = pad_right(log_probs, 0.0, torch.float32)
    if count == 0:
        return
    tokens = torch.zeros(G, count, T, dtype=torch.int64)
    candidates = torch.zeros(G, count, T)
    for n, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        pair = torch.tensor(row[length:], dtype=torch.float64).view(2, count, length)
        tokens[n, :, :length], candidates[n, :, :length] = pair
    group[CANDIDATES], group[CANDIDATE_LOG_PROBS] = tokens, candidates


def staleness_metrics(groups: TensorDictBase, step: int, steps_per_round: int) -> dict[str, float]:
    """Return the staleness metrics of a round when the trainer receives it.

    Args:
        groups: ``[P]``, see :mod:`torchrl_grpo.batch.schema`.
        step: number of optimizer steps before the round.
        steps_per_round: number of optimizer steps per round; ages are measured in rounds.

    Returns:
        ``policy/age_mean`` and ``policy/age_max`` of the oldest token of each response, ``policy/age_<n>``
        the share of responses of that age, and ``policy/mixed`` the share with tokens of several versions.
    """
    oldest = groups["policy_version"].flatten().tolist()
    newest = groups["newest_policy_version"].flatten().tolist()
    ages = [step // steps_per_round - version // steps_per_round for version in oldest]
    counts = Counter(ages)
    return {
        "policy/age_mean": sum(ages) / len(ages),
        "policy/age_max": max(ages),
        **{f"policy/age_{age}": counts[age] / len(ages) for age in sorted(counts)},
        "policy/mixed": sum(a != b for a, b in zip(oldest, newest, strict=True)) / len(ages),
    }


def pass_rates(round_: Round, reward: str, threshold: float) -> dict[int, float]:
    """Return the share of right responses of each group, by its number.

    Args:
        round_: the round.
        reward: name of the reward that says which response is right. The sum of the rewards counts for a
            response that has no such reward.
        threshold: least value of a right response.

    Groups are left out of which the reward judged no response, because it is a judge that failed.
    """
    P, G = round_.groups["group_id"].shape
    numbers = round_.groups["group_id"][:, 0].tolist()
    # In float32 0.7 + 0.2 + 0.1 is 1.
    totals = round_.groups["next", "reward"].float().flatten().tolist()
    right = [
        parts.get(reward, total) >= threshold
        for parts, total in zip(round_.rewards_by_name, totals, strict=True)
    ]
    failed = [
        reward in errors and reward not in parts
        for parts, errors in zip(round_.rewards_by_name, round_.errors, strict=True)
    ]
    return {numbers[p]: sum(right[p * G : (p + 1) * G]) / G for p in range(P) if not failed[p * G]}


def error_share(round_: Round) -> dict[str, float]:
    """Return the metric ``reward/error_share``: of the reward that failed most, the share of its calls.

    Empty if no reward failed.
    """
    failed = Counter(name for errors in round_.errors for name in errors)
    calls = Counter(
        name for each in zip(round_.rewards_by_name, round_.errors, strict=True) for name in _called(*each)
    )
    return {"reward/error_share": max(failed[name] / calls[name] for name in failed)} if failed else {}


def _called(parts: Mapping[str, float], errors: Mapping[str, str]) -> dict[str, None]:
    """Return the names of the rewards that were called, those that failed and did not count too."""
    return dict.fromkeys([*parts, *errors])


def check_rewards(
    rewards_by_name: Sequence[Mapping[str, float]],
    errors_by_response: Sequence[Mapping[str, str]],
    weights: Mapping[str, float],
    where: str,
) -> None:
    """Check that a reward judged at least one response.

    Args:
        rewards_by_name: named rewards of each response.
        errors_by_response: errors of each response, by the name of the reward.
        weights: weights of the rewards by name. One of weight 0 teaches nothing.
        where: what has the responses, such as "the first round".

    Raises:
        TrainingStopped: every call of every reward failed. The message has the errors.
    """
    calls = [
        (name, errors.get(name))
        for parts, errors in zip(rewards_by_name, errors_by_response, strict=True)
        for name in _called(parts, errors)
        if weights.get(name)
    ]
    if not calls or any(error is None for _, error in calls):
        return
    errors_by_name = dict(reversed(calls))
    raise TrainingStopped(
        f"every reward failed on all {len(errors_by_response)} responses of {where}: "
        + ", and ".join(f"{name} with {error}" for name, error in errors_by_name.items())
        + "; correct it (reward.functions names functions of your own) and start a new run, in which a "
        "reward returns a number, such as 0, for a response that it cannot judge"
    )


def episode_metrics(round_: Round) -> dict[str, float]:
    """Return the metrics of episodes of several turns: means over the responses. Empty for one turn."""
    records = round_.records
    if not records:
        return {}
    return {
        "episode/turns": sum(record.turns for record in records) / len(records),
        "episode/tool_calls": sum(record.tool_calls for record in records) / len(records),
        "episode/tool_errors": sum(record.tool_errors for record in records) / len(records),
        "episode/failed": sum(record.error is not None for record in records) / len(records),
    }


def rollout_rows(round_: Round, groups: TensorDictBase) -> list[dict[str, Any]]:
    """One row for each of the P x G responses, group by group. A row of an episode has its messages too.

    Args:
        round_: texts, named rewards and their errors.
        groups: the same groups from the buffer, with advantages.
    """
    samples = groups["advantage"].shape[1]
    columns = zip(
        [text for text in round_.prompts for _ in range(samples)],
        [text for group in round_.responses for text in group],
        groups["next", "reward"].flatten().tolist(),
        round_.rewards_by_name,
        groups["advantage"].flatten().tolist(),
        groups["policy_version"].flatten().tolist(),
        round_.errors,
        groups["group_id"].flatten().tolist(),
        sampled_counts(groups).flatten().tolist(),
        groups["truncated"].flatten().tolist(),
        strict=True,
    )
    rows = [dict(zip(_ROLLOUT_FIELDS, column, strict=True)) for column in columns]
    for row, verdicts in zip(rows, round_.verdicts, strict=True):
        if verdicts:
            row["verdicts"] = verdicts
    for row, record in zip(rows, round_.records, strict=False):
        row["messages"] = record.messages
    for number, files in enumerate(pictures_of(groups)):
        for row in rows[number * samples : (number + 1) * samples]:
            row["pictures"] = list(files)
    return rows


def pictures_of(groups: TensorDictBase) -> list[dict[str, bytes]]:
    """Return the pictures of each of the P prompts by the names of their files; empty for a model of text."""
    if groups.get("pictures", None) is None:
        return []
    rows = [split_files(*(group[key][None] for key in PICTURE_KEYS)) for group in groups.unbind(0)]
    return [by_name(row) for (row,) in rows]


def discarded_rows(round_: Round, reasons: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each response of groups that were thrown away, without an advantage.

    Args:
        round_: the groups.
        reasons: why each group was thrown away.
    """
    groups = round_.groups.copy()
    groups["advantage"] = torch.zeros_like(groups["next", "reward"])
    rows = rollout_rows(round_, groups)
    for number, row in enumerate(rows):
        del row["advantage"]
        row["discarded"] = reasons[number // len(round_.responses[0])]
    return rows
