"""Groups that wait for the trainer in a checkpoint."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.scale.collection import waiting
from torchrl_grpo.data.episode import EpisodeRecord
from torchrl_grpo.data.example import Example
from torchrl_grpo.rewards.types import ResponseScore
from torchrl_grpo.rollout import saved_groups
from torchrl_grpo.rollout.groups import Group, Response, ScoredGroup

RECORD = EpisodeRecord([{"role": "assistant", "content": "a"}], ["a"], 0.5, 1)
RESPONSES = [
    Response([7, 150_000], [-0.1, -1e-30], [3, 4], "stop", [True, False], RECORD),
    Response([], [], [], "length"),
    Response([1], [-0.25], [4], "stop"),
]
PROBLEM = Example("p/1", [{"role": "user", "content": "q"}], {"answer": "72"}, {"column": [1, None]})
SCORES = [
    ResponseScore(0.1 + 0.2, {"r": 0.3}, {}, {}),
    ResponseScore(0.0, {}, {"r": "ValueError: no"}, {"judge": "good"}),
    ResponseScore(1.0, {"r": 1.0}),
]
GROUPS = [
    ScoredGroup(Group(5, [1, 2], 9, RESPONSES, PROBLEM), ["a", "", "b"], SCORES),
    ScoredGroup(
        Group(6, [3], 10, RESPONSES[::-1], None, [4, 5]), ["b", "", "a"], SCORES, [[-0.5], [], [1.0, 2]]
    ),
    ScoredGroup(Group(8, [3], 11, RESPONSES[:1], None, []), ["a"], SCORES[:1], [[0.1, 0.2]]),
]


@pytest.mark.parametrize("groups", [GROUPS, GROUPS[:1], []], ids=["all", "one", "none"])
def test_groups_come_back_as_they_were(groups: list[ScoredGroup], tmp_path: Path) -> None:
    torch.save(saved_groups.to_state(groups), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True, mmap=True)
    assert saved_groups.from_state(state) == groups


def test_a_group_comes_from_a_worker_as_it_was() -> None:
    responses = [
        *RESPONSES,
        Response([7, 7], [math.nan, -0.0], [2**40, 2**40], None, [False, False]),
        Response([2**33, 0], [0.0, -0.0], [3, 3], "stop"),
    ]
    group = Group(5, [1, 2], 9, responses, PROBLEM)
    # Types and signs of zeros too.
    assert repr(pickle.loads(pickle.dumps(group))) == repr(group)


def test_a_response_of_a_worker_is_small() -> None:
    response = Response([*range(1_000)], [-0.5] * 1_000, [300] * 1_000, "stop")
    assert len(pickle.dumps(response)) < 1_000 * (8 + 8) + 500


def test_a_log_probability_that_is_not_finite_is_kept() -> None:
    groups = [ScoredGroup(Group(0, [1], 0, [Response([1], [math.nan], [0], "stop")]), [""], SCORES[:1])]
    (restored,) = saved_groups.from_state(saved_groups.to_state(groups))
    assert math.isnan(restored.group.responses[0].log_probs[0])


def test_groups_of_older_checkpoints_come_back() -> None:
    def older(scored: ScoredGroup) -> dict[str, Any]:
        group = asdict(scored.group)
        del group["pictures"]
        if group["problem"] is None:
            # As in checkpoints from before episodes and teachers.
            del group["problem"]
        scores = [[score.total, score.parts, score.errors, score.verdicts] for score in scored.scores]
        return {"group": group, "texts": scored.texts, "scored": scores, "reference": scored.reference}

    assert saved_groups.from_state({"accepted": list(map(older, GROUPS))}) == GROUPS


def test_workers_go_on_while_groups_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    collector, dispatcher = waiting(8_000)
    convert = saved_groups.to_state

    def converting(groups: Sequence[ScoredGroup]) -> dict[str, Any]:
        assert dispatcher.run_in_thread(lambda: "the thread has time") == "the thread has time"
        return convert(groups)

    monkeypatch.setattr(saved_groups, "to_state", converting)
    state = collector.state_dict()
    before = dict(dispatcher.accepted)
    dispatcher.accepted = {}
    collector.load_state_dict(state)
    assert dispatcher.accepted == before and len(before) == 2
    dispatcher.close()
