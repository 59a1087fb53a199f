"""The closeness reward: a slope towards the right number."""

from __future__ import annotations

import pytest

from torchrl_grpo.data.example import Example
from torchrl_grpo.rewards.text import ClosenessReward


@pytest.mark.parametrize(
    ("answer", "value"),
    [("7", 1.0), ("8", 0.5), ("6", 0.5), ("-2", 0.1), ("7.5", 1 / 1.5), ("7 apples", 0.0), ("", 0.0)],
)
@pytest.mark.parametrize(
    "truth", [{"answer": "7"}, {"entry": {"answer": "7"}}], ids=["plain", "reasoning_gym"]
)
def test_closeness_falls_with_the_distance(answer: str, value: float, truth: dict[str, object]) -> None:
    assert ClosenessReward("plain")(answer, Example("x", [], truth)) == pytest.approx(value)


def test_a_truth_that_is_no_number_is_an_error_and_not_a_zero() -> None:
    with pytest.raises(ValueError, match="x is 'red'"):
        ClosenessReward("plain")("7", Example("x", [], {"answer": "red"}))
