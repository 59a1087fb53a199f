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
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    measured: dict[str, Any] = in_ranks(
        COUNT, tmp_path_factory.mktemp("engines") / "out.pt", [], "engine_program.py"
    )
    return measured


def log_probs_of(completions: list[Completion]) -> dict[str, torch.Tensor]:
    return {str(number): torch.tensor(completion.log_probs) for number, completion in enumerate(completions)}


@pytest.mark.parametrize("name", ASKS)
def test_ranks_generate_what_one_engine_does(results: dict[str, Any], name: str) -> None:
    ours, alone, exact = (
        [completion for group in results[name + end] for completion in group] for end in ENGINES
    )
    assert len(results[name]) == len(ASKS[name][0])
    for completion, other in zip(ours, alone, strict=True):
        assert (completion.token_ids, completion.finish_reason) == (other.token_ids, other.finish_reason)
    assert_rounds_alike(
        *(
            {str(n): torch.tensor(completion.log_probs) for n, completion in enumerate(completions)}
            for completions in (ours, alone, exact)
        )
    )


def test_each_prompt_is_one_ranks_and_no_rank_waits(results: dict[str, Any]) -> None:
    rounds = [prompts[:2] for prompts in results["asked"]]
    for number in range(2):
        shares = [round_[number] for round_ in rounds]
        assert sorted(prompt for share in shares for prompt in share) == sorted(PROMPTS)
        sizes = [len(share) for share in shares]
        assert min(sizes) >= 1 and max(sizes) <= -(-len(PROMPTS) // COUNT)
    # A single prompt is nobody else's.
    assert sum(len(prompts) == 3 for prompts in results["asked"]) == 1


def test_each_rank_gets_its_own_share_of_a_call(results: dict[str, Any]) -> None:
    assert results["shared"] == [(f"of rank {rank}", 7) for rank in range(COUNT)]


def test_rank_0_alone_gets_the_tensors_of_all_ranks_bit_for_bit(results: dict[str, Any]) -> None:
    rows, received, counts = results["rows"]
    assert counts == [COUNT] + [0] * (COUNT - 1)
    for ours, theirs in zip(received, rows, strict=True):
        assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("when", ["published", "next, woken"])
def test_all_ranks_answer_with_the_published_weights(results: dict[str, Any], when: str) -> None:
    ours, alone, exact = results[when], results["next, alone"], results["next, exact"]
    assert results["version"] == 3
    assert ours.token_ids.tolist() == alone.token_ids.tolist() * COUNT
    assert_rounds_alike(
        {"next": ours.log_probs},
        *({"next": answer.log_probs.repeat(COUNT, 1)} for answer in (alone, exact)),
    )


def test_a_rank_that_does_not_take_weights_is_named(results: dict[str, Any]) -> None:
    assert (
        f"DataParallelEngine {COUNT - 1}: after publishing version 4, 1 of 21 tensors" in results["refused"]
    )
    assert "lm_head.weight" in results["refused"]


def test_an_interrupt_leaves_the_ranks_in_step(results: dict[str, Any]) -> None:
    assert results["interrupted"] is not None
    assert results["arrived"] == (list(range(COUNT)), COUNT)
