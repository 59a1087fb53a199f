"""The transformers engine against Hugging Face's own generation and against the definition of sampling."""

from __future__ import annotations

import copy
import math
from collections import Counter
from typing import Any

import families
import pytest
import torch
from batches import END, PAD, make_model
from rounding import EQUAL, EXACT
from slow_cases import slow_except
from transformers import PreTrainedModel

from torchrl_grpo.errors import ModelError
from torchrl_grpo.inference import Completion, Engine, Probe, Sampling
from torchrl_grpo.inference.checksums import Checksums
from torchrl_grpo.inference.transformers_engine import TransformersEngine
from torchrl_grpo.models.scoring.token_scorer import output_head

PROMPTS = [[5, 9, 2, 30], [7], [11, 2, 2, 40, 41, 42, 43, 3]]
ALL_FAMILIES = ["llama", "llama_tied", "gpt2", "mistral_sliding", "gemma2", "qwen3"]


def make_engine(model: PreTrainedModel | None = None, **options: Any) -> TransformersEngine:
    return TransformersEngine(make_model() if model is None else model, [END], PAD, **options)


def sampling(**changes: Any) -> Sampling:
    return Sampling(
        **{"num_samples": 3, "max_new_tokens": 8, "temperature": 0.8, "seeds": [10, 20, 30], **changes}
    )


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_greedy_equals_hugging_face_generate(family: str) -> None:
    model = make_model(family)
    groups = make_engine(model).generate(PROMPTS, Sampling(1, 16, 0.0))
    for prompt, (completion,) in zip(PROMPTS, groups, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16, pad_token_id=PAD
        )
        assert completion.token_ids == expected[0, len(prompt) :].tolist()


def make_family(family: str) -> PreTrainedModel:
    return make_model(family) if family in ALL_FAMILIES else families.build(*families.FAMILIES[family][:2])


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("temperature", slow_except([0.6], [0.0, 0.6, 1.0, 1.7]))
# The last two have states of convolutions and of linear attention, which go to each response of a prompt.
@pytest.mark.parametrize("family", [*ALL_FAMILIES, "lfm2 conv", "qwen3-next"])
def test_log_probs_are_those_of_a_full_forward_pass(family: str, temperature: float) -> None:
    model = make_family(family)
    groups = make_engine(model).generate(PROMPTS, sampling(temperature=temperature, max_new_tokens=12))
    for prompt, group in zip(PROMPTS, groups, strict=True):
        assert len(group) == 3
        for completion in group:
            logits = model(input_ids=torch.tensor([prompt + completion.token_ids])).logits[0]
            log_p = torch.log_softmax(logits / (temperature or 1.0), -1)[len(prompt) - 1 : -1]
            expected = log_p.gather(-1, torch.tensor(completion.token_ids)[:, None]).squeeze(-1)
            assert completion.log_probs == pytest.approx(expected.tolist(), **EQUAL)


@pytest.mark.parametrize("seeded", [True, False])
def test_sampled_frequencies_follow_the_distribution(seeded: bool) -> None:
    model, draws = make_model(initializer_range=0.2), 4000
    seeds = [0] if seeded else None
    torch.manual_seed(0)
    engine = make_engine(model, max_rows=draws)
    (group,) = engine.generate([PROMPTS[0]], Sampling(draws, 1, 0.7, seeds))
    counts = Counter(completion.token_ids[0] for completion in group)
    probabilities = torch.softmax(
        model(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1] / 0.7, -1
    ).tolist()
    assert max(probabilities) < 0.9, "a distribution with one outcome tests nothing"
    for token, p in enumerate(probabilities):
        # Six standard deviations: this cannot fail by chance, and the seed is fixed besides.
        assert abs(counts[token] / draws - p) < 6 * math.sqrt(p * (1 - p) / draws) + 1 / draws, token


def test_later_tokens_follow_the_distribution_too() -> None:
    model = make_model(initializer_range=0.2)
    (group,) = make_engine(model, max_rows=4000).generate([[7]], Sampling(4000, 2, 1.0, [3]))
    firsts = Counter(c.token_ids[0] for c in group if c.token_ids[0] != END)
    token, count = firsts.most_common(1)[0]
    seconds = Counter(c.token_ids[1] for c in group if c.token_ids[0] == token)
    probabilities = torch.softmax(model(input_ids=torch.tensor([[7, token]])).logits[0, -1], -1).tolist()
    for second, p in enumerate(probabilities):
        assert abs(seconds[second] / count - p) < 6 * math.sqrt(p * (1 - p) / count) + 1 / count, second


def test_equal_seeds_give_equal_responses_whatever_ran_before() -> None:
    engine, other = make_engine(), make_engine()
    other.generate(PROMPTS, sampling(seeds=None))
    torch.rand(100)
    assert engine.generate(PROMPTS, sampling()) == other.generate(PROMPTS, sampling())


def test_another_seed_gives_another_response_and_samples_differ() -> None:
    engine = make_engine()
    groups = engine.generate(PROMPTS, sampling(max_new_tokens=12))
    changed = engine.generate(PROMPTS, sampling(max_new_tokens=12, seeds=[10, 20, 31_000]))
    assert tokens(groups)[:2] == tokens(changed)[:2]
    assert tokens(groups)[2] != tokens(changed)[2]
    assert len({tuple(completion.token_ids) for completion in groups[0]}) > 1


def tokens(groups: list[list[Completion]]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in group] for group in groups]


def test_a_response_does_not_depend_on_its_neighbours_in_the_batch() -> None:
    engine = make_engine()
    together = engine.generate(PROMPTS, sampling())
    alone = [engine.generate([p], sampling(seeds=[s]))[0] for p, s in zip(PROMPTS, [10, 20, 30], strict=True)]
    swapped = engine.generate(PROMPTS[::-1], sampling(seeds=[30, 20, 10]))
    fewer_rows = make_engine(max_rows=4).generate(PROMPTS, sampling())
    assert tokens(together) == tokens(alone) == tokens(swapped)[::-1] == tokens(fewer_rows)


def test_no_more_rows_than_allowed_are_generated_at_a_time() -> None:
    engine = make_engine(max_rows=7)
    rows: list[int] = []
    engine.model.register_forward_hook(lambda *call: rows.append(call[2].logits.shape[0]))
    assert len(engine.generate(PROMPTS * 2, sampling(seeds=list(range(6))))) == 6
    assert max(rows) == 6


def test_greedy_leaves_the_global_random_state_alone() -> None:
    engine = make_engine()
    before = torch.get_rng_state()
    engine.generate(PROMPTS, Sampling(2, 4, 0.0))
    engine.generate(PROMPTS, sampling())
    assert torch.equal(torch.get_rng_state(), before)


class Scripted(torch.nn.Module):
    """Answers with a fixed next token per last token: 10 -> 11 -> 12 -> end, and 20 -> 20 for ever."""

    NEXT = torch.arange(61)
    NEXT[10], NEXT[11], NEXT[12], NEXT[30] = 11, 12, END, 5

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()
        self.config = self.inner.config

    def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
        output = self.inner(input_ids=input_ids, **options)
        output.logits = 100.0 * torch.nn.functional.one_hot(self.NEXT[input_ids[:, -1:]], 61).float()
        return output


def test_finish_reasons_and_the_end_token() -> None:
    engine = TransformersEngine(Scripted(), [END, 5], PAD)
    prompts = [[1, 10], [20], [7, 8, 12], [30]]
    groups = engine.generate(prompts, Sampling(2, 4, 0.0))
    expected = [([11, 12, END], "stop"), ([20] * 4, "length"), ([END], "stop"), ([5], "stop")]
    assert [[(c.token_ids, c.finish_reason) for c in group] for group in groups] == [[e, e] for e in expected]
    assert all(len(c.log_probs) == len(c.token_ids) for group in groups for c in group)


def test_an_end_token_in_the_last_place_is_a_stop() -> None:
    engine = TransformersEngine(Scripted(), [END], PAD)
    (((completion),),) = engine.generate([[10]], Sampling(1, 3, 0.0))
    assert (completion.token_ids, completion.finish_reason) == ([11, 12, END], "stop")


@pytest.mark.usefixtures("float64")
def test_next_tokens_are_the_likeliest_at_temperature_one() -> None:
    model = make_model()
    result = make_engine(model).next_tokens(Probe(PROMPTS, top_k=5))
    assert result.token_ids.shape == result.log_probs.shape == (3, 5)
    assert result.cached_tokens == 0
    for row, prompt in enumerate(PROMPTS):
        top = torch.log_softmax(model(input_ids=torch.tensor([prompt])).logits[0, -1], -1).topk(5)
        assert result.token_ids[row].tolist() == top.indices.tolist()
        torch.testing.assert_close(result.log_probs[row], top.values, **EXACT)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_a_float32_head_rounds_nothing_after_the_last_hidden_state(family: str) -> None:
    model, published = (make_model(family, seed=seed).bfloat16() for seed in (0, 1))
    engine = make_engine(model, head_dtype=torch.float32)
    engine.locate_weights({name: tuple(p.shape) for name, p in model.named_parameters()})
    # What sleeping and loading do to ties and names must not matter.
    engine.sleep()
    engine.load_weights(weights_of(published))
    assert engine.checksums() == _checksums(published)
    hidden: list[torch.Tensor] = []
    output_head(model).register_forward_pre_hook(lambda _, arguments: hidden.append(arguments[0][:, -1]))
    result = engine.next_tokens(Probe(PROMPTS, top_k=5))
    assert hidden[0].dtype is torch.bfloat16
    logits = hidden[0].double() @ output_head(published).weight.detach().double().T
    cap = model.config.to_dict().get("final_logit_softcapping")
    right, rounded = (
        torch.log_softmax((values if cap is None else cap * torch.tanh(values / cap)).double(), -1)
        for values in (logits, logits.bfloat16())
    )
    assert (right - rounded).abs().max() > 1e-3
    torch.testing.assert_close(
        result.log_probs.double(), right.gather(1, result.token_ids), rtol=0, atol=1e-5
    )


def _checksums(model: PreTrainedModel) -> tuple[Checksums, ...]:
    engine = make_engine(model)
    engine.locate_weights({name: tuple(p.shape) for name, p in model.named_parameters()})
    return engine.checksums()


def test_a_float32_head_is_refused_where_the_head_is_no_matrix() -> None:
    model = make_model()
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(ModelError, match=r"write inference_model\.head_dtype=auto"):
        make_engine(model, head_dtype=torch.float32)


def weights_of(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    return [(name, p.detach()) for name, p in model.named_parameters()]


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_loaded_weights_answer_and_are_copies(family: str) -> None:
    engine, other = make_engine(make_model(family)), make_model(family, seed=1)
    engine.load_weights(weights_of(other))
    expected = make_engine(copy.deepcopy(other)).generate(PROMPTS, sampling())
    assert engine.generate(PROMPTS, sampling()) == expected
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    assert engine.generate(PROMPTS, sampling()) == expected


@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize("wake_first", [True, False])
def test_sleep_wake_and_load_is_a_round_trip(family: str, wake_first: bool) -> None:
    model = make_model(family)
    kept = copy.deepcopy(model)
    engine = make_engine(model)
    expected = engine.generate(PROMPTS, sampling())
    for _ in range(2):
        engine.sleep()
        engine.sleep()  # twice is once
        assert all(p.device.type == "meta" for p in model.parameters())
        if wake_first:
            engine.wake()
        engine.load_weights(weights_of(kept))
        assert engine.generate(PROMPTS, sampling()) == expected


def test_waking_an_engine_that_is_awake_loses_nothing() -> None:
    engine = make_engine()
    expected = engine.generate(PROMPTS, sampling())
    engine.wake()
    assert engine.generate(PROMPTS, sampling()) == expected


def test_a_sleeping_engine_does_not_answer() -> None:
    engine = make_engine()
    engine.sleep()
    with pytest.raises(AssertionError, match="sleeping"):
        engine.generate(PROMPTS, sampling())


def test_an_unknown_weight_is_an_error() -> None:
    with pytest.raises(KeyError, match=r"no.such.weight"):
        make_engine().load_weights([("no.such.weight", torch.zeros(1))])


def test_the_protocol_asks_for_all_verbs() -> None:
    with pytest.raises(TypeError, match="abstract"):
        type("Half", (Engine,), {"generate": lambda *_: []})()
    assert make_engine().policy_version == 0


def test_close_gives_the_model_back() -> None:
    engine = make_engine()
    engine.close()
    with pytest.raises(AttributeError):
        engine.generate(PROMPTS, sampling())
