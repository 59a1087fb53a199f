"""One engine made of each rank's: who generates what, and that it is what one engine alone generates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_program import ASKS, PROMPTS
from helpers_ranks import in_ranks

COUNTS = (2, 3)


@pytest.fixture(scope="module")
def by_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    folder = tmp_path_factory.mktemp("engines")
    return {count: in_ranks(count, folder / f"{count}.pt", [], "engine_program.py") for count in COUNTS}


@pytest.mark.parametrize("name", ASKS)
@pytest.mark.parametrize("count", COUNTS)
def test_ranks_generate_what_one_engine_does(by_ranks: dict[int, Any], count: int, name: str) -> None:
    ours, alone = by_ranks[count][name], by_ranks[count][f"{name}, alone"]
    assert len(ours) == len(ASKS[name][0])
    for group, expected in zip(ours, alone, strict=True):
        for one, other in zip(group, expected, strict=True):
            assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)


@pytest.mark.parametrize("count", COUNTS)
def test_each_prompt_is_one_ranks_and_no_rank_waits(by_ranks: dict[int, Any], count: int) -> None:
    rounds = [asked[:2] for asked in by_ranks[count]["asked"]]
    for number in range(2):
        shares = [round_[number] for round_ in rounds]
        assert sorted(prompt for share in shares for prompt in share) == sorted(PROMPTS)
        sizes = [len(share) for share in shares]
        assert min(sizes) >= 1 and max(sizes) <= -(-len(PROMPTS) // count)
    # A single prompt is nobody else's.
    assert sum(len(asked) == 3 for asked in by_ranks[count]["asked"]) == 1


@pytest.mark.parametrize("when", ["published", "next, woken"])
@pytest.mark.parametrize("count", COUNTS)
def test_all_ranks_answer_with_the_published_weights(by_ranks: dict[int, Any], count: int, when: str) -> None:
    found = by_ranks[count]
    ours, alone = found[when], found["next, alone"]
    assert found["version"] == 3
    assert ours.token_ids.tolist() == alone.token_ids.tolist() * count
    torch.testing.assert_close(ours.log_probs, alone.log_probs.repeat(count, 1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("count", COUNTS)
def test_a_rank_that_does_not_take_weights_is_named(by_ranks: dict[int, Any], count: int) -> None:
    assert f"the engine of training rank {count - 1} has not taken" in by_ranks[count]["refused"]
    assert "lm_head.weight" in by_ranks[count]["refused"]


@pytest.mark.parametrize("count", COUNTS)
def test_an_interrupt_leaves_the_ranks_in_step(by_ranks: dict[int, Any], count: int) -> None:
    assert by_ranks[count]["interrupted"] is not None
    assert by_ranks[count]["arrived"] == (list(range(count)), count)
