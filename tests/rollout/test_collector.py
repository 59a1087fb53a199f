"""The collector: its interface, its seeds, its state, and what it writes into a round."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.group_text import GroupTextEnv
from torchrl_grpo.envs.stream import PromptStream
from torchrl_grpo.inference import Completion, Sampling
from torchrl_grpo.inference.transformers_engine import TransformersEngine
from torchrl_grpo.rewards.types import ResponseScore
from torchrl_grpo.rollout.collector import RolloutCollector
from torchrl_grpo.runtime.rng import derive_seed

P, G = 2, 3


class LengthReward:
    """A reward set of one: the number of characters; an answer without letters is an error."""

    names = ("length",)

    def score(self, completions: Sequence[str], examples: Sequence[Example]) -> list[ResponseScore]:
        return [
            ResponseScore(float(len(text)), {"length": float(len(text))}, {} if text else {"length": "empty"})
            for text in completions
        ]


class Spy(TransformersEngine):
    """Remembers how it was used, and can answer from a script."""

    script: list[list[Completion]] | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seeds: list[list[int]] = []
        self.verbs: list[str] = []

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        self.verbs.append("generate")
        self.seeds.append(list(sampling.seeds or []))
        self.sampling = sampling
        return super().generate(prompts, sampling) if self.script is None else self.script

    def reset_cache(self) -> None:
        self.verbs.append("reset_cache")

    def close(self) -> None:
        self.verbs.append("close")


@pytest.fixture
def make(tiny_model_dir: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    truths: Any = [str(i + 4) for i in range(5)]
    examples = [
        Example(f"q{i}", [{"role": "user", "content": f"What is {i} + 4?"}], truths[i]) for i in range(5)
    ]

    def build(seed: int = 0, turns: int = 3 * P * G) -> RolloutCollector:
        model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
        env = GroupTextEnv(
            PromptStream(examples, seed),
            tokenizer,
            LengthReward(),  # type: ignore[arg-type]
            num_envs=P,
            repeats=G,
            max_prompt_tokens=200,
        )
        return RolloutCollector(
            env,
            Spy(model, [tokenizer.eos_token_id], tokenizer.pad_token_id),
            tokenizer,
            max_new_tokens=6,
            temperature=0.9,
            total_dialog_turns=turns,
            seed=seed,
            clock=itertools.count().__next__,
        )

    return build


def assert_same_rounds(one: Any, other: Any) -> None:
    assert (one.prompts, one.responses, one.rewards_by_name) == (
        other.prompts,
        other.responses,
        other.rewards_by_name,
    )
    for key in one.groups.keys(True, True):
        assert torch.equal(one.groups[key], other.groups[key]), key


def test_iterating_yields_rounds_until_the_turns_are_used(make: Any) -> None:
    collector = make(turns=3 * P * G)
    collector.start()
    rounds = list(collector)
    assert len(rounds) == 3 and collector.rounds_sampled == 3
    assert collector.dialog_turns_per_batch == P * G
    assert list(collector) == [], "the turns are used up"
    collector.shutdown()
    assert collector.engine.verbs[-1] == "close"


def test_a_round_holds_what_was_sampled(make: Any) -> None:
    collector = make()
    collector.engine.policy_version = 7
    assert collector.policy_version == 7
    round_ = collector.rollout()
    groups = round_.groups
    assert groups.batch_size == (P,) and (groups["policy_version"] == 7).all()
    assert groups["group_id"].tolist() == [[0] * G, [1] * G]
    assert collector.engine.sampling.temperature == 0.9 and collector.engine.sampling.num_samples == G
    for p in range(P):
        prompt = groups["tokens", "prompt"][p][groups["masks", "prompt"][p]]
        assert collector.tokenizer.decode(prompt) == round_.prompts[p]
        for s in range(G):
            ids = groups["tokens", "response"][p, s][groups["masks", "response"][p, s]]
            text = collector.tokenizer.decode(ids).removesuffix(collector.tokenizer.eos_token)
            assert text == round_.responses[p][s]
            assert float(groups["next", "reward"][p, s]) == len(round_.responses[p][s])
            assert round_.rewards_by_name[p * G + s] == {"length": len(round_.responses[p][s])}
    assert round_.seconds == {"time/generate_s": 1, "time/score_s": 1}
    assert collector.rollout().groups["group_id"].tolist() == [[2] * G, [3] * G]


def test_the_end_token_belongs_to_the_response_and_masks_go_by_length(make: Any) -> None:
    collector = make()
    end = collector.tokenizer.eos_token_id
    assert end == collector.tokenizer.pad_token_id
    stop, alone = Completion([70, 71, end], [-1.0, -2.0, -3.0], "stop"), Completion([end], [-4.0], "stop")
    cut = Completion([72, 73, 74, 75, 76, 77], [-0.1] * 6, "length")
    collector.engine.script = [[stop, alone, cut], [alone, alone, stop]]
    round_ = collector.rollout()
    groups = round_.groups
    assert groups["masks", "response"].sum(-1).tolist() == [[3, 1, 6], [1, 1, 3]]
    assert groups["tokens", "response"][0, 0].tolist() == [70, 71, end, end, end, end]
    assert groups["log_probs", "response"][0, 0].tolist() == [-1.0, -2.0, -3.0, 0.0, 0.0, 0.0]
    assert groups["truncated"].squeeze(-1).tolist() == [[False, False, True], [False] * 3]
    # The text that is rewarded has no end token, and an empty answer reports its error in its own place.
    assert round_.responses[0][1] == ""
    assert [bool(e) for e in round_.errors] == [False, True, False, True, True, False]


def test_the_cache_is_emptied_before_each_round(make: Any) -> None:
    collector = make()
    list(collector)
    assert collector.engine.verbs == ["reset_cache", "generate"] * 3


def test_seeds_depend_on_the_round_and_on_nothing_that_ran_before(make: Any) -> None:
    plain, disturbed = make(), make()
    first, second = plain.rollout(), plain.rollout()
    assert_same_rounds(disturbed.rollout(), first)
    # What an evaluation does between two rounds.
    disturbed.engine.generate([[5, 6]], Sampling(2, 3, 1.0, [1]))
    disturbed.engine.generate([[5, 6]], Sampling(2, 3, 0.0))
    torch.rand(5)
    assert_same_rounds(disturbed.rollout(), second)
    seeds = [seed for row in plain.engine.seeds for seed in row]
    assert len(set(seeds)) == 2 * P
    assert make(seed=1).rollout().responses != first.responses


def test_a_resumed_collector_continues_with_the_same_rounds(make: Any) -> None:
    whole = make(turns=5 * P * G)
    rounds = list(whole)
    first = make(turns=5 * P * G)
    # Two rounds of 2 out of 5 examples: the third crosses the epoch.
    for _ in range(2):
        first.rollout()
    state = first.state_dict()
    assert all(isinstance(value, int) for value in state.values())
    resumed = make(turns=5 * P * G)
    resumed.load_state_dict(state)
    rest = list(resumed)
    assert len(rest) == 3
    for expected, found in zip(rounds[2:], rest, strict=True):
        assert_same_rounds(found, expected)


def test_derived_seeds_are_stable_distinct_and_leave_room_for_samples() -> None:
    seeds = {derive_seed(s, name, i) for s in range(10) for name in ("rollout", "eval") for i in range(100)}
    assert len(seeds) == 2000
    assert all(0 <= seed < 2**48 for seed in seeds)
    # Fixed for ever: a run resumed under a later version must draw the same.
    assert derive_seed(0, "rollout", 0, 0) == 144290650004261
    assert derive_seed(1, "1") != derive_seed(11, "")


# --- calls of TorchRL's LLMCollector ----------------------------------------------------------------


def test_tensordicts_come_one_by_one_and_from_the_iterator(make: Any) -> None:
    whole = list(make(turns=2 * P * G))
    for found in (list(make(turns=2 * P * G).iterator()), list(iter(make(turns=2 * P * G).next, None))):
        assert len(found) == 2
        for groups, round_ in zip(found, whole, strict=True):
            assert groups.batch_size == (P,)
            for key in round_.groups.keys(True, True):
                assert torch.equal(groups[key], round_.groups[key]), key
    collector = make(turns=P * G)
    assert collector.next() is not None and collector.next() is None and collector.next() is None


def test_a_postproc_sees_every_tensordict_and_there_is_one(make: Any) -> None:
    collector = make(turns=2 * P * G)
    collector.set_postproc(lambda groups: groups.set("mine", groups["next", "reward"] * 2))
    for groups in collector.iterator():
        assert torch.equal(groups["mine"], groups["next", "reward"] * 2)
    with pytest.raises(RuntimeError, match="postproc already"):
        collector.set_postproc(lambda groups: groups)


def test_a_seed_makes_a_collector_what_one_built_with_it_is(make: Any) -> None:
    collector, other = make(seed=0), make(seed=5)
    before = list(collector)
    assert collector.next() is None
    assert collector.set_seed(5, static_seed=True) == 5
    after, expected = list(collector), list(other)
    assert len(before) == len(after) == len(expected) == 3
    for one, two in zip(after, expected, strict=True):
        assert_same_rounds(one, two)
    assert [one.responses for one in before] != [one.responses for one in after]
    collector.set_seed(5)
    assert collector.next() is not None


@pytest.mark.parametrize("form", ["model", "policy", "dict", "tensordict", "nested"])
def test_weights_that_are_given_sample_the_next_round(make: Any, form: str) -> None:
    collector, other = make(), make()
    model = other.engine.model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    named = dict(model.named_parameters())
    given = {
        "model": ((model,), {}),
        "policy": ((), {"policy": model}),
        "dict": ((named,), {}),
        "tensordict": ((), {"weights": TensorDict(named)}),
        "nested": ((TensorDict(named).unflatten_keys("."),), {}),
    }[form]
    assert collector.get_policy_version() == 0
    collector.update_policy_weights_(*given[0], **given[1])
    assert collector.get_policy_version() == collector.policy_version == 1
    one, expected = collector.rollout(), other.rollout()
    assert one.responses == expected.responses and one.responses != make().rollout().responses
    torch.testing.assert_close(one.groups["log_probs", "response"], expected.groups["log_probs", "response"])
    assert one.groups["policy_version"].eq(1).all()


def test_weights_are_given_once(make: Any) -> None:
    collector = make()
    for arguments in ((), (collector.engine.model,)):
        options = {} if not arguments else {"policy": collector.engine.model}
        with pytest.raises(ValueError, match="one model"):
            collector.update_policy_weights_(*arguments, **options)
    assert collector.policy_version == 0


def test_what_the_engine_cut_is_truncated_whatever_its_length(make: Any) -> None:
    collector = make()
    ended = Completion([5, 2], [-1.0, -1.0], "stop")
    cut = Completion([5, 6], [-1.0, -1.0], "length")
    collector.engine.script = [[ended, cut, ended], [cut, cut, ended]]
    groups = collector.rollout().groups
    assert groups["truncated"][..., 0].tolist() == [[False, True, False], [True, True, False]]
