"""The collector: its interface, its seeds, its state, and what it writes into a round."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import assert_same_groups
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_grpo.batch.schema import collate
from torchrl_grpo.config import Config
from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.group_text import GroupTextEnv
from torchrl_grpo.envs.stream import PromptStream
from torchrl_grpo.inference import Completion, Probe, Sampling
from torchrl_grpo.inference.protocol import Request
from torchrl_grpo.inference.transformers_engine import TransformersEngine
from torchrl_grpo.planning import placement
from torchrl_grpo.planning.request import build_request
from torchrl_grpo.rewards.types import ResponseScore
from torchrl_grpo.rollout.build import EngineSource, build_collector
from torchrl_grpo.rollout.collector import Collector
from torchrl_grpo.runtime.rng import derive_seed

P, G = 2, 3


class LengthReward:
    """A reward set of one: the number of characters; an answer without letters is an error."""

    names = ("length",)
    parallel_calls = groups_per_call = 1

    def __init__(self) -> None:
        self.calls: list[tuple[threading.Thread, int]] = []

    def score(self, completions: Sequence[str], examples: Sequence[Example]) -> list[ResponseScore]:
        self.calls.append((threading.current_thread(), len(completions)))
        return [
            ResponseScore(float(len(text)), {"length": float(len(text))}, {} if text else {"length": "empty"})
            for text in completions
        ]


class Spy(TransformersEngine):
    """Remembers how it was used, and can answer from a script."""

    script: list[list[Completion]] | None = None
    error: BaseException | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seeds: list[list[int | None]] = []
        self.verbs: list[str] = []

    def submit(self, requests: Sequence[Request]) -> None:
        if requests:
            self.verbs.append("submit")
        self.seeds.append([request.seed for request in requests[::G]])
        self.requests = requests
        if self.script is None:
            super().submit(requests)

    def step(self) -> list[tuple[Hashable, Completion]]:
        if self.error is not None:
            raise self.error
        if self.script is None:
            return super().step()
        answers = [answer for group in self.script for answer in group]
        return [(request.key, answer) for request, answer in zip(self.requests, answers, strict=True)]

    def reset_cache(self) -> None:
        self.verbs.append("reset_cache")

    def close(self) -> None:
        self.verbs.append("close")


def engine_of(collector: Collector) -> Spy:
    engine = collector.worker_group.local_engine
    assert isinstance(engine, Spy)
    return engine


def publish(collector: Collector, version: int) -> None:
    weights = dict(engine_of(collector).model.named_parameters())
    probe = Probe([[1]], 1, {name: tuple(tensor.shape) for name, tensor in weights.items()})
    collector.worker_group.send(weights.items(), version, probe)
    collector.worker_group.policy_version = version
    engine_of(collector).verbs.clear()


@pytest.fixture
def make(tiny_model_dir: Path) -> Iterator[Any]:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    truths: Any = [str(i + 4) for i in range(5)]
    examples = [
        Example(f"q{i}", [{"role": "user", "content": f"What is {i} + 4?"}], truths[i]) for i in range(5)
    ]
    collectors: list[Collector] = []

    def build(seed: int = 0, turns: int = 3 * P * G) -> Collector:
        cfg = Config()
        cfg.seed, cfg.env.num_envs, cfg.env.repeats, cfg.train.total_dialog_turns = seed, P, G, turns
        cfg.model.name = str(tiny_model_dir)
        cfg.inference_model.max_new_tokens, cfg.inference_model.temperature = 6, 0.9

        def make_engine(*arguments: Any, **options: Any) -> Spy:
            model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
            return Spy(model, [tokenizer.eos_token_id], tokenizer.pad_token_id)

        env = GroupTextEnv(
            PromptStream(examples, seed),
            tokenizer,
            LengthReward(),  # type: ignore[arg-type]
            num_envs=P,
            repeats=G,
            max_prompt_tokens=200,
        )
        plan = placement.plan(build_request(cfg, asynchronous=False), num_gpus=0)
        name, end = cfg.model.name, [tokenizer.eos_token_id]
        source = EngineSource(name, name, plan, end, len(tokenizer), None, True, make_engine)
        collectors.append(build_collector(cfg, source, env, tokenizer))
        publish(collectors[-1], 0)
        return collectors[-1]

    yield build
    for collector in collectors:
        collector.shutdown()


def assert_same_rounds(first: Any, other: Any) -> None:
    assert (first.prompts, first.responses, first.rewards_by_name) == (
        other.prompts,
        other.responses,
        other.rewards_by_name,
    )
    assert_same_groups(first.groups, other.groups)


def test_iterating_yields_rounds_until_the_turns_are_used(make: Any) -> None:
    collector = make(turns=3 * P * G)
    collector.start()
    rounds = list(collector)
    assert len(rounds) == 3 and collector.summary_entries() == {"dialog_turns": 3 * P * G}
    assert collector.dialog_turns_per_batch == P * G
    assert list(collector) == [], "the turns are used up"
    collector.shutdown()
    assert engine_of(collector).verbs[-1] == "close"


def test_a_round_holds_what_was_sampled(make: Any) -> None:
    collector = make()
    publish(collector, 7)
    assert collector.policy_version == 7
    round_ = collector.rollout()
    groups = round_.groups
    assert groups.batch_size == (P,) and (groups["policy_version"] == 7).all()
    assert groups["group_id"].tolist() == [[0] * G, [1] * G]
    requests = engine_of(collector).requests
    assert len(requests) == P * G and all(request.temperature == 0.9 for request in requests)
    for p in range(P):
        prompt, responses, mask = (
            groups[p]["tokens", "prompt"],
            groups[p]["tokens", "response"],
            groups[p]["masks"],
        )
        assert collector.source.tokenizer.decode(prompt) == round_.prompts[p]
        for s in range(G):
            ids = responses[s][mask["response"][s]]
            tokenizer = collector.source.tokenizer
            text = tokenizer.decode(ids).removesuffix(tokenizer.eos_token)
            assert text == round_.responses[p][s]
            assert float(groups["next", "reward"][p, s]) == len(round_.responses[p][s])
            assert round_.rewards_by_name[p * G + s] == {"length": len(round_.responses[p][s])}
    assert round_.seconds.keys() == {"time/generate_s", "time/score_s"}
    assert all(seconds > 0 for seconds in round_.seconds.values())
    speeds = collector.round_metrics(round_)
    assert speeds.keys() == {"throughput/generated_tokens_per_s", "throughput/scored_tokens_per_s"}
    assert collector.rollout().groups["group_id"].tolist() == [[2] * G, [3] * G]


def test_workers_are_measured_by_their_mean_and_their_extremes(make: Any) -> None:
    collector = make()
    start = collector._since[0]
    others = {"score_seconds": 0.0, "restarts": 0, "queue": 0}
    collector._since = (start, {"tokens": [0, 0, 0], "seconds": [1.0, 1.0, 1.0], **others})
    collector._worker_stats = lambda: {"tokens": [0, 8, 4], "seconds": [1.0, 2.0, 6.0], **others}
    collector._clock = lambda: start + 4.0
    collector._is_local = False
    metrics = collector.round_metrics(None)
    # The first worker had nothing to do. The last one began before the other round what it ended now.
    shares = {"busy_share": 0.5, "busy_share_min": 0.0, "busy_share_max": 1.0}
    rates = {"tokens_per_s": 4.4, "tokens_per_s_min": 0.8, "tokens_per_s_max": 8.0, "slowest": 2}
    for name, value in (shares | rates).items():
        assert metrics[f"workers/{name}"] == value, name
    collector._since = (start, collector._worker_stats())
    assert "workers/slowest" not in collector.round_metrics(None)


def test_a_coarse_clock_does_not_end_a_run(make: Any) -> None:
    collector = make()
    round_ = replace(collector.rollout(), seconds=dict.fromkeys(("time/generate_s", "time/score_s"), 0.0))
    assert all(speed > 0 for speed in collector.round_metrics(round_).values())


def test_the_end_token_belongs_to_the_response_and_masks_go_by_length(make: Any) -> None:
    collector = make()
    end = collector.source.tokenizer.eos_token_id
    assert end == collector.source.tokenizer.pad_token_id
    stop, alone = Completion([70, 71, end], [-1.0, -2.0, -3.0], "stop"), Completion([end], [-4.0], "stop")
    cut = Completion([72, 73, 74, 75, 76, 77], [-0.1] * 6, "length")
    engine_of(collector).script = [[stop, alone, cut], [alone, alone, stop]]
    round_ = collector.rollout()
    groups = collate(round_.groups.unbind(0))
    assert groups["masks", "response"].sum(-1).tolist() == [[3, 1, 6], [1, 1, 3]]
    assert groups["tokens", "response"][0, 0].tolist() == [70, 71, end, end, end, end]
    # Each group has its own width.
    assert [group["tokens", "response"].shape for group in round_.groups] == [(3, 6), (3, 3)]
    assert groups["log_probs", "response"][0, 0].tolist() == [-1.0, -2.0, -3.0, 0.0, 0.0, 0.0]
    assert groups["truncated"].squeeze(-1).tolist() == [[False, False, True], [False] * 3]
    # The text that is rewarded has no end token, and an empty answer reports its error in its own place.
    assert round_.responses[0][1] == ""
    assert [bool(e) for e in round_.errors] == [False, True, False, True, True, False]


def test_a_round_is_one_batch_of_the_engine_with_an_empty_cache(make: Any) -> None:
    collector = make()
    list(collector)
    assert engine_of(collector).verbs == ["reset_cache", "submit"] * 3


def test_a_round_is_scored_at_once_in_the_thread_of_the_trainer(make: Any) -> None:
    collector = make()
    list(collector)
    assert collector.env.reward_set.calls == [(threading.current_thread(), P * G)] * 3


@pytest.mark.parametrize("error", [OverflowError("the device is full"), KeyboardInterrupt()])
def test_an_error_of_the_engine_is_raised_as_it_is_and_again(make: Any, error: BaseException) -> None:
    collector = make()
    engine_of(collector).error = error
    for _ in range(2):
        with pytest.raises(type(error)) as raised:
            collector.rollout()
        assert raised.value is error


def test_seeds_depend_on_the_round_and_on_nothing_that_ran_before(make: Any) -> None:
    plain, disturbed = make(), make()
    first, second = plain.rollout(), plain.rollout()
    assert_same_rounds(disturbed.rollout(), first)
    # What an evaluation does between two rounds.
    disturbed.worker_group.generate([[5, 6]], Sampling(2, 3, 1.0, [1]))
    disturbed.worker_group.generate([[5, 6]], Sampling(2, 3, 0.0))
    torch.rand(5)
    assert_same_rounds(disturbed.rollout(), second)
    seeds = [seed for row in engine_of(plain).seeds for seed in row]
    assert len(set(seeds)) == 2 * P
    assert make(seed=1).rollout().responses != first.responses


def test_a_resumed_collector_continues_with_the_same_rounds(make: Any) -> None:
    whole = make(turns=5 * P * G)
    rounds = list(whole)
    first = make(turns=5 * P * G)
    # Two rounds of 2 out of 5 examples: the third crosses the epoch.
    for _ in range(2):
        first.rollout()
    # The second is what earlier versions wrote.
    for state in (first.state_dict(), {"rounds": 2, "taken": 2, "epoch": 0, "position": 4}):
        resumed = make(turns=5 * P * G)
        resumed.load_state_dict(state)
        rest = list(resumed)
        assert len(rest) == 3
        for expected, actual in zip(rounds[2:], rest, strict=True):
            assert_same_rounds(actual, expected)


def test_an_earlier_checkpoint_with_refills_goes_on_with_the_next_problems(make: Any) -> None:
    whole = make(turns=5 * P * G)
    whole.rollout()
    for _ in range(2):
        whole.rollout(is_refill=True)
    resumed = make(turns=5 * P * G)
    resumed.load_state_dict({"rounds": 3, "taken": 1, "epoch": 1, "position": 1})
    assert resumed.state_dict() == whole.state_dict()
    assert_same_rounds(resumed.rollout(), whole.rollout())


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
    for collected in (list(make(turns=2 * P * G).iterator()), list(iter(make(turns=2 * P * G).next, None))):
        assert len(collected) == 2
        for groups, round_ in zip(collected, whole, strict=True):
            assert groups.batch_size == (P,)
            assert_same_groups(groups, round_.groups)
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
    for round_, two in zip(after, expected, strict=True):
        assert_same_rounds(round_, two)
    assert [round_.responses for round_ in before] != [round_.responses for round_ in after]
    collector.set_seed(5)
    assert collector.next() is not None


@pytest.mark.parametrize("form", ["model", "policy", "dict", "tensordict", "nested"])
def test_weights_that_are_given_sample_the_next_round(make: Any, form: str) -> None:
    collector, other = make(), make()
    model = engine_of(other).model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    named = dict(model.named_parameters())
    updates = {
        "model": ((model,), {}),
        "policy": ((), {"policy": model}),
        "dict": ((named,), {}),
        "tensordict": ((), {"weights": TensorDict(named)}),
        "nested": ((TensorDict(named).unflatten_keys("."),), {}),
    }[form]
    assert collector.get_policy_version() == 0
    collector.update_policy_weights_(*updates[0], **updates[1])
    assert collector.get_policy_version() == collector.policy_version == 1
    round_, expected = collector.rollout(), other.rollout()
    assert round_.responses == expected.responses and round_.responses != make().rollout().responses
    for group, other_group in zip(round_.groups, expected.groups, strict=True):
        torch.testing.assert_close(group["log_probs", "response"], other_group["log_probs", "response"])
    assert round_.groups["policy_version"].eq(1).all()


def test_weights_are_given_once(make: Any) -> None:
    collector = make()
    model = engine_of(collector).model
    for arguments in ((), (model,)):
        options = {} if not arguments else {"policy": model}
        with pytest.raises(ValueError, match="one model"):
            collector.update_policy_weights_(*arguments, **options)
    assert collector.policy_version == 0


def test_what_the_engine_cut_is_truncated_whatever_its_length(make: Any) -> None:
    collector = make()
    ended = Completion([5, 2], [-1.0, -1.0], "stop")
    cut = Completion([5, 6], [-1.0, -1.0], "length")
    engine_of(collector).script = [[ended, cut, ended], [cut, cut, ended]]
    groups = collector.rollout().groups
    assert groups["truncated"][..., 0].tolist() == [[False, True, False], [True, True, False]]
