"""Dynamic sampling around a collector whose rounds are known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from torchrl_grpo.batch.schema import build_batch
from torchrl_grpo.inference import Completion
from torchrl_grpo.rollout.dynamic_sampling import collect_with_signal
from torchrl_grpo.rollout.round import Round


class Rounds:
    """Hands out rounds of two samples a group; ``plan`` says which groups have rewards that differ."""

    def __init__(self, plan: list[str]) -> None:
        self.plan = plan
        self.num_rollouts = 0

    def rollout(self, is_refill: bool = False) -> Round:
        number, signals = self.num_rollouts, self.plan[self.num_rollouts]
        self.num_rollouts += 1
        size = len(signals)
        ids = [[10 * number + group] * (1 + number) for group in range(size)]
        rewards = torch.tensor([[0.0, 1.0] if signal == "x" else [0.5, 0.5] for signal in signals])[..., None]
        groups = build_batch(
            ids,
            [[Completion(row, [-1.0] * len(row), "stop")] * 2 for row in ids],
            rewards,
            rewards,
            torch.arange(10 * number, 10 * number + size)[:, None].expand(size, 2),
            versions=0,
            pad_token_id=0,
        )
        names = [f"{number}.{group}" for group in range(size)]
        parts: list[dict[str, Any]] = [{"name": f"{name}.{s}"} for name in names for s in range(2)]
        return Round(
            groups,
            names,
            [[f"{n}.0", f"{n}.1"] for n in names],
            parts,
            [{} for _ in range(2 * size)],
            [{} for _ in range(2 * size)],
            7,
            2,
            [],
            {"time/generate_s": 1.0, "time/score_s": 0.5},
        )


def flat(groups: TensorDict) -> Tensor:
    rewards = groups["next", "reward"].squeeze(-1)
    equal: Tensor = (rewards == rewards[:, :1]).all(-1)
    return equal


@pytest.mark.parametrize(
    ("plan", "limit", "names", "refills"),
    [
        (["xxx"], 3, ["0.0", "0.1", "0.2"], 0),
        (["x-x", "-x-"], 3, ["0.0", "0.2", "1.1"], 1),
        # What is left over is thrown away.
        (["x-x", "xxx"], 3, ["0.0", "0.2", "1.0"], 1),
        (["---", "-x-", "---", "xx-"], 3, ["1.1", "3.0", "3.1"], 3),
        # The limit: the rest is filled with what there is.
        (["-x-", "---"], 1, ["0.1", "0.0", "0.2"], 1),
        (["---", "---", "---"], 2, ["0.0", "0.1", "0.2"], 2),
    ],
)
def test_rounds_are_filled_in_order(plan: list[str], limit: int, names: list[str], refills: int) -> None:
    source: Any = Rounds(plan)
    observed: list[str] = []
    discarded: dict[str, str] = {}

    def discard(left: Round, reasons: list[str]) -> None:
        assert [group[0] for group in left.responses] == [f"{prompt}.0" for prompt in left.prompts]
        discarded.update(zip(left.prompts, reasons, strict=True))

    round_, metrics = collect_with_signal(
        source.rollout, flat, limit, lambda collected: observed.extend(collected.prompts), discard
    )
    assert discarded == {
        prompt: "all rewards are equal"
        if plan[int(prompt[0])][int(prompt[2])] == "-"
        else "the round was full"
        for prompt in observed
        if prompt not in names
    }
    # Groups that are thrown away too, and each once.
    assert observed == [f"{number}.{group}" for number in range(1 + refills) for group in range(3)]
    assert round_.prompts == names and metrics == {"rollout/refills": refills}
    assert source.num_rollouts == 1 + refills
    # Everything that belongs to a group has come along with it.
    assert round_.responses == [[f"{name}.0", f"{name}.1"] for name in names]
    assert [part["name"] for part in round_.rewards_by_name] == [
        f"{name}.{s}" for name in names for s in range(2)
    ]  # type: ignore[comparison-overlap]
    numbers = [10 * int(name[0]) + int(name[2]) for name in names]
    assert round_.groups["group_id"][:, 0].tolist() == numbers
    assert [group["tokens", "prompt"][-1].item() for group in round_.groups] == numbers
    assert flat(round_.groups).tolist() == [plan[int(name[0])][int(name[2])] == "-" for name in names]
    assert round_.response_tokens == 7 * (1 + refills) and round_.error_count == 2 * (1 + refills)
    assert round_.seconds == {"time/generate_s": 1.0 * (1 + refills), "time/score_s": 0.5 * (1 + refills)}


def test_without_a_limit_the_first_round_is_taken_as_it_is() -> None:
    source: Any = Rounds(["---"])
    round_, metrics = collect_with_signal(source.rollout, flat, 0)
    assert round_.prompts == ["0.0", "0.1", "0.2"] and metrics == {}
