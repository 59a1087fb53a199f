"""Scored groups in a checkpoint: plain values for each group, and a few tensors with the numbers of all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_grpo.data.episode import EpisodeRecord
from torchrl_grpo.data.example import Example
from torchrl_grpo.rewards.types import ResponseScore
from torchrl_grpo.rollout.groups import OF_TOKENS, Group, Response, ScoredGroup
from torchrl_grpo.runtime.no_collection import no_collection


def to_state(scored: Sequence[ScoredGroup]) -> dict[str, Any]:
    """Return groups as values for a checkpoint, without their pictures.

    A list of numbers costs a checkpoint a hundred times as much as a tensor. Each list is converted by
    itself, so that no other thread waits long.
    """
    if not scored:
        return {"accepted": []}
    responses = [response for each in scored for response in each.group.responses]
    rows = {name: _pack([getattr(r, name) for r in responses], kind) for name, kind in OF_TOKENS.items()}
    rows["prompt"] = _pack([each.group.prompt for each in scored], np.int64)
    rows["teacher_prompt"] = _pack([each.group.teacher_prompt or [] for each in scored], np.int64)
    rows["reference"] = _pack([row for each in scored for row in each.reference or ()], np.float64)
    return {"accepted": [_entry(each) for each in scored], "rows": rows}


def from_state(state: Mapping[str, Any]) -> list[ScoredGroup]:
    """Return the groups of :meth:`to_state`, or of a checkpoint that has lists in place of tensors."""
    with no_collection():
        if "rows" not in state:
            return [_from_lists(entry) for entry in state["accepted"]]
        rows = {name: _unpack(packed) for name, packed in state["rows"].items()}
        return [_restored(entry, rows) for entry in state["accepted"]]


def _pack(rows: Sequence[Sequence[float]], kind: type[np.generic]) -> tuple[Tensor, Tensor]:
    """Return the lengths of rows, and their numbers one after the other."""
    arrays = [np.zeros(0, kind), *(np.fromiter(row, kind, len(row)) for row in rows)]
    counts = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return counts, torch.from_numpy(np.concatenate(arrays))


def _unpack(packed: tuple[Tensor, Tensor]) -> Iterator[list[Any]]:
    """Yield the rows of :func:`_pack`, and their numbers as Python has them."""
    counts, values = packed[0].tolist(), packed[1].numpy()
    start = 0
    for count in counts:
        row = values[start : start + count]
        # All tokens of a response often have the same version, and the model has sampled all.
        repeats = count > 0 and row[0] == row[-1] and (row == row[0]).all()
        yield row[:1].tolist() * count if repeats else row.tolist()
        start += count


def _entry(scored: ScoredGroup) -> dict[str, Any]:
    group = scored.group
    return {
        "group_id": group.group_id,
        "seed": group.seed,
        "problem": group.problem and asdict(group.problem),
        "has_teacher_prompt": group.teacher_prompt is not None,
        "responses": [
            (response.finish_reason, response.record and asdict(response.record))
            for response in group.responses
        ],
        "texts": scored.texts,
        "scored": [
            [score.total, dict(score.parts), dict(score.errors), dict(score.verdicts)]
            for score in scored.scores
        ],
        "reference": None if scored.reference is None else len(scored.reference),
    }


def _restored(entry: dict[str, Any], rows: Mapping[str, Iterator[list[Any]]]) -> ScoredGroup:
    """Return a group with its numbers, which are the next ones of ``rows``."""
    responses = [
        Response(
            finish_reason=reason,
            record=record and EpisodeRecord(**record),
            **{name: next(rows[name]) for name in OF_TOKENS},
        )
        for reason, record in entry["responses"]
    ]
    teacher_prompt = next(rows["teacher_prompt"])
    group = Group(
        entry["group_id"],
        next(rows["prompt"]),
        entry["seed"],
        responses,
        entry["problem"] and Example(**entry["problem"]),
        teacher_prompt if entry["has_teacher_prompt"] else None,
    )
    count = entry["reference"]
    reference = None if count is None else [next(rows["reference"]) for _ in range(count)]
    return ScoredGroup(group, entry["texts"], [ResponseScore(*score) for score in entry["scored"]], reference)


def _from_lists(entry: dict[str, Any]) -> ScoredGroup:
    group = dict(entry["group"])
    responses = [
        Response(**{**response, "record": response.get("record") and EpisodeRecord(**response["record"])})
        for response in group.pop("responses")
    ]
    problem = group.pop("problem", None)
    return ScoredGroup(
        Group(**group, responses=responses, problem=problem and Example(**problem)),
        entry["texts"],
        [ResponseScore(*score) for score in entry["scored"]],
        entry.get("reference"),
    )
