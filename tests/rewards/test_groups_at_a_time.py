"""How many groups and held-out responses are scored at a time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from torchrl_grpo.data.example import Example
from torchrl_grpo.rewards.graders import CountingGrader
from torchrl_grpo.rewards.reward_set import MixtureRewardSet, RewardSet
from torchrl_grpo.rewards.types import ResponseScore, Reward

GROUPS = [[Example(name, [], {}, {})] * 2 for name in ("first", "second", "third")]


class Length:
    name = "length"

    def __call__(self, completion: str, example: Example) -> float:
        return float(len(completion))


class Hanging(Length):
    """Hangs on the first group until the others are scored; with ``score_batch``, one call for each group."""

    def __init__(self) -> None:
        self.others_are_scored = threading.Event()

    def score_batch(self, completions: Sequence[str], examples: Sequence[Example]) -> list[float]:
        if examples[0].id == "first":
            assert self.others_are_scored.wait(60)
        return [float(len(completion)) for completion in completions]


class Waiting(Length):
    name = "waiting"
    parallel_calls = 5

    def score_batch(self, completions: Sequence[str], examples: Sequence[Example]) -> list[float]:
        return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("rewards", "workers", "groups"),
    [
        ([Length()], 1, 1),
        ([Length()], 3, 3),
        ([Length(), Waiting()], 1, 5),
        ([Length(), Waiting()], 3, 5),
        ([Length(), Waiting()], 8, 8),
    ],
)
def test_as_many_groups_are_scored_as_keep_the_workers_busy(
    rewards: list[Reward], workers: int, groups: int
) -> None:
    with closing(RewardSet([(reward, 1.0) for reward in rewards], workers=workers)) as made:
        assert made.parallel_calls == groups
        assert MixtureRewardSet({"part": made, "other": RewardSet([])}).parallel_calls == groups


def test_beside_a_judge_one_worker_gets_one_call_at_a_time() -> None:
    running, most = 0, 0

    class Counting(Length):
        def score_batch(self, completions: Sequence[str], examples: Sequence[Example]) -> list[float]:
            nonlocal running, most
            running += 1
            most = max(most, running)
            threading.Event().wait(0.01)
            running -= 1
            return [0.0] * len(completions)

    with (
        closing(RewardSet([(Counting(), 1.0), (Waiting(), 1.0)], workers=1)) as rewards,
        ThreadPoolExecutor(rewards.parallel_calls) as threads,
    ):
        list(threads.map(lambda group: rewards.score(["a", "b"], group), GROUPS * 4))
    assert most == 1


def test_a_call_that_hangs_holds_up_its_own_group_alone() -> None:
    reward = Hanging()
    with (
        closing(RewardSet([(reward, 1.0)], workers=2, group_size=2)) as rewards,
        ThreadPoolExecutor(rewards.parallel_calls) as threads,
    ):
        first, *others = [threads.submit(rewards.score, ["a", "ab"], group) for group in GROUPS]
        assert [[score.total for score in other.result(60)] for other in others] == [[1.0, 2.0]] * 2
        assert not first.done()
        reward.others_are_scored.set()
        assert [score.total for score in first.result(60)] == [1.0, 2.0]


class Noting(Length):
    """Notes the problems of each call, which fails if a text is ``bad``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[list[str]] = []

    def score_batch(self, completions: Sequence[str], examples: Sequence[Example]) -> list[float]:
        self.calls.append([example.id for example in examples[::2]])
        if "bad" in completions:
            raise ValueError("a bad text")
        return [float(len(completion)) for completion in completions]


class Joined(Noting):
    prompts_per_call = 2


def test_a_call_has_several_groups_of_a_reward_that_allows_it_and_one_of_others() -> None:
    joined, other = Joined("joined"), Noting("other")
    examples = [example for group in GROUPS for example in group]
    with closing(RewardSet([(joined, 1.0), (other, 10.0)], group_size=2)) as rewards:
        assert rewards.groups_per_call == 2
        assert MixtureRewardSet({"part": rewards, "other": RewardSet([])}).groups_per_call == 2
        scores = rewards.score(["a", "ab", "", "abc", "a", ""], examples)
        assert rewards.score([], []) == []
    assert joined.calls == [["first", "second"], ["third"]]
    assert other.calls == [["first"], ["second"], ["third"]]
    assert [score.total for score in scores] == [11.0, 22.0, 0.0, 33.0, 11.0, 0.0]


def test_all_workers_get_calls_before_one_gets_several_groups() -> None:
    joined = Joined("joined")
    with closing(RewardSet([(joined, 1.0)], workers=3, group_size=2)) as rewards:
        rewards.score([""] * 6, [example for group in GROUPS for example in group])
        assert sorted(joined.calls) == [["first"], ["second"], ["third"]]
        joined.calls.clear()
        rewards.score([""] * 12, [example for group in GROUPS * 2 for example in group])
    assert sorted(map(len, joined.calls)) == [2, 2, 2]


def test_a_call_of_several_groups_that_fails_is_repeated_for_each() -> None:
    joined = Joined("joined")
    with closing(RewardSet([(joined, 1.0)], on_error=-1.0, group_size=2)) as rewards:
        scores = rewards.score(["a", "ab", "bad", "abc", "a", ""], [e for group in GROUPS for e in group])
        assert rewards.error_count == 2
    assert joined.calls == [["first", "second"], ["first"], ["second"], ["third"]]
    assert [score.total for score in scores] == [1.0, 2.0, -1.0, -1.0, 1.0, 0.0]
    assert [bool(score.errors) for score in scores] == [False, False, True, True, False, False]


class Pairs:
    """Grades a completion only while another one is graded; the third has none."""

    primary = "right"
    metrics: tuple[str, ...] = ("right",)

    def __init__(self) -> None:
        self.both = threading.Barrier(2)

    def grade(self, completion: str, example: Example, score: ResponseScore) -> dict[str, float]:
        self.both.wait(60)
        if completion == "wrong":
            raise ValueError("no grade")
        return {"right": float(completion)}

    def weights(self, example: Example) -> dict[str, float]:
        return {"right": 1.0}

    def close(self) -> None:
        """Nothing to stop."""


def test_held_out_responses_are_graded_side_by_side_in_their_order() -> None:
    grader = CountingGrader(Pairs(), workers=2)
    grades = grader.grade(["0.1", "0.2", "wrong", "0.4"], [*GROUPS[0], *GROUPS[1]])
    assert [grade.metrics["right"] for grade in grades] == [0.1, 0.2, 0.0, 0.4]
    assert grader.error_count == 1
