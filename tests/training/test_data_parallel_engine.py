"""One engine made of each rank's: who generates what, and that it is what one engine alone generates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_program import ASKS, PROMPTS
from rank_runs import in_ranks
from rounding import assert_rounds_alike

from torchrl_grpo.inference.protocol import Completion

pytestmark = pytest.mark.slow

# Which divide no round here evenly; commands with two are in tests/distributed/test_ranks.py.
COUNT = 3
ENGINES = ("", ", alone", ", exact")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    measured: dict[str, Any] = in_ranks(
        COUNT, tmp_path_factory.mktemp("engines") / "out.pt", [], "engine_program.py"
    )
    return measured


def log_probs_of(completions: list[Completion]) -> dict[str, torch.Tensor]:
    return {str(number): torch.tensor(one.log_probs) for number, one in enumerate(completions)}


@pytest.mark.parametrize("name", ASKS)
def test_ranks_generate_what_one_engine_does(found: dict[str, Any], name: str) -> None:
    ours, alone, exact = ([one for group in found[name + end] for one in group] for end in ENGINES)
    assert len(found[name]) == len(ASKS[name][0])
    for one, other in zip(ours, alone, strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
    assert_rounds_alike(
        *(
            {str(n): torch.tensor(one.log_probs) for n, one in enumerate(found)}
            for found in (ours, alone, exact)
        )
    )


def test_each_prompt_is_one_ranks_and_no_rank_waits(found: dict[str, Any]) -> None:
    rounds = [asked[:2] for asked in found["asked"]]
    for number in range(2):
        shares = [round_[number] for round_ in rounds]
        assert sorted(prompt for share in shares for prompt in share) == sorted(PROMPTS)
        sizes = [len(share) for share in shares]
        assert min(sizes) >= 1 and max(sizes) <= -(-len(PROMPTS) // COUNT)
    # A single prompt is nobody else's.
    assert sum(len(asked) == 3 for asked in found["asked"]) == 1


def test_each_rank_gets_its_own_share_of_a_call(found: dict[str, Any]) -> None:
    assert found["shared"] == [(f"of rank {rank}", 7) for rank in range(COUNT)]


@pytest.mark.parametrize("when", ["published", "next, woken"])
def test_all_ranks_answer_with_the_published_weights(found: dict[str, Any], when: str) -> None:
    ours, alone, exact = found[when], found["next, alone"], found["next, exact"]
    assert found["version"] == 3
    assert ours.token_ids.tolist() == alone.token_ids.tolist() * COUNT
    assert_rounds_alike(
        {"next": ours.log_probs},
        *({"next": one.log_probs.repeat(COUNT, 1)} for one in (alone, exact)),
    )


def test_a_rank_that_does_not_take_weights_is_named(found: dict[str, Any]) -> None:
    assert f"DataParallelEngine {COUNT - 1}: after publishing version 4, 1 of 21 tensors" in found["refused"]
    assert "lm_head.weight" in found["refused"]


def test_an_interrupt_leaves_the_ranks_in_step(found: dict[str, Any]) -> None:
    assert found["interrupted"] is not None
    assert found["arrived"] == (list(range(COUNT)), COUNT)
