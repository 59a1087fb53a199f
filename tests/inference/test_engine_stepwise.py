"""Engines token by token: what is aborted and submitted again is what would have come anyway."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from batches import END, PAD, make_model
from rounding import EQUAL

from torchrl_grpo.inference import Completion, Request, Sampling
from torchrl_grpo.inference.protocol import build_requests
from torchrl_grpo.inference.transformers_engine import TransformersEngine

PROMPTS = [[5, 9, 2, 30], [7], [11, 2, 2, 40, 41, 42, 43, 3]]


def make_engine(family: str = "llama", **options: Any) -> TransformersEngine:
    return TransformersEngine(make_model(family), [END], PAD, **options)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_an_aborted_greedy_response_continues_as_if_it_had_not_been(family: str) -> None:
    whole = make_engine(family).generate(PROMPTS, Sampling(1, 12, 0.0))
    engine = make_engine(family)
    requests = build_requests(PROMPTS, Sampling(1, 12, 0.0))
    engine.submit(requests)
    ended = [engine.step() for _ in range(5)]
    taken = engine.abort_all()
    assert {len(completion.token_ids) for completion in taken.values()} == {5}, (
        "a test without a cut tests nothing"
    )
    assert all(
        completion.finish_reason == "aborted" and len(completion.log_probs) == 5
        for completion in taken.values()
    )
    engine.submit(
        [
            Request(request.key, [*request.tokens, *taken[request.key].token_ids], 12 - 5, 0.0)
            for request in requests
            if request.key in taken
        ]
    )
    completions = {key: completion for step in ended for key, completion in step}
    while len(completions) < len(PROMPTS):
        for key, rest in engine.step():
            completions[key] = Completion(
                taken[key].token_ids + rest.token_ids,
                taken[key].log_probs + rest.log_probs,
                rest.finish_reason,
            )
    for number, (completion,) in enumerate(whole):
        assert completions["generate", number, 0].token_ids == completion.token_ids
        assert completions["generate", number, 0].log_probs == pytest.approx(completion.log_probs, **EQUAL)
        assert completions["generate", number, 0].finish_reason == completion.finish_reason


def test_a_response_that_has_ended_does_not_run_past_the_positions_of_the_model() -> None:
    engine = TransformersEngine(make_model("gpt2", n_positions=16), [END], PAD)
    # As where a cut response, nearly whole, goes on beside one that has just begun.
    inputs = [(list(range(3, 15)), 4), ([5, 9], 14)]
    engine.submit(
        [Request(n, tokens, new, 1.0, n, ignore_eos=True) for n, (tokens, new) in enumerate(inputs)]
    )
    completions = dict(ended for _ in range(14) for ended in engine.step())
    assert [len(completions[number].token_ids) for number in range(2)] == [4, 14]


def test_a_token_of_the_request_ends_its_response_alone() -> None:
    whole = make_engine().generate(PROMPTS, Sampling(1, 8, 0.0, ignore_eos=True))
    stop = whole[1][0].token_ids[2]
    assert stop != END
    engine = make_engine()
    requests = build_requests(PROMPTS, Sampling(1, 8, 0.0, ignore_eos=True))
    requests[1] = replace(requests[1], ignore_eos=False, stop_token_ids=(stop,))
    engine.submit(requests)
    completions = dict(ended for _ in range(8) for ended in engine.step())
    ended = completions["generate", 1, 0]
    assert ended.token_ids[-1] == stop and ended.finish_reason == "stop" and len(ended.token_ids) <= 3
    assert [len(completions["generate", number, 0].token_ids) for number in (0, 2)] == [8, 8]


def test_requests_that_came_later_wait_and_are_aborted_empty() -> None:
    engine = make_engine()
    engine.submit([Request("first", PROMPTS[0], 6, 1.0, 1, ignore_eos=True)])
    engine.step()
    engine.submit([Request("second", PROMPTS[1], 6, 1.0, 2, ignore_eos=True)])
    engine.step()
    taken = engine.abort_all()
    assert {key: len(completion.token_ids) for key, completion in taken.items()} == {"first": 2, "second": 0}
    assert engine.abort_all() == {}


def test_no_more_rows_than_allowed_and_groups_stay_together() -> None:
    whole = make_engine().generate(PROMPTS, Sampling(3, 8, 1.0, [1, 2, 3]))
    widths: list[int] = []
    engine = make_engine(max_rows=7)
    forward = engine._step

    def spy(ids: torch.Tensor, *rest: object) -> torch.Tensor:
        widths.append(ids.shape[0])
        return forward(ids, *rest)  # type: ignore[arg-type]

    engine._step = spy  # type: ignore[method-assign,assignment]
    cut = engine.generate(PROMPTS, Sampling(3, 8, 1.0, [1, 2, 3]))
    assert max(widths) == 6 and widths[0] == 2, "two prompts run once each, then their six samples"
    assert [[completion.token_ids for completion in group] for group in cut] == [
        [completion.token_ids for completion in group] for group in whole
    ]


def test_each_request_has_its_own_temperature_length_and_end() -> None:
    engine = make_engine()
    greedy = copy.copy(engine.generate([PROMPTS[0]], Sampling(1, 4, 0.0))[0][0])
    engine.submit(
        [Request("greedy", PROMPTS[0], 4, 0.0), Request("long", PROMPTS[0], 9, 1.5, 3, ignore_eos=True)]
    )
    completions: dict[object, Completion] = {}
    while len(completions) < 2:
        completions.update(engine.step())
    assert completions["greedy"].token_ids == greedy.token_ids
    assert len(completions["long"].token_ids) == 9 and completions["long"].finish_reason == "length"
