"""What the prompt has opened counts as written, and tags that are special tokens are read."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from episodes import Talk, talking
from tensordict import NonTensorStack, TensorDict
from tiny_tokenizers import build_chatml, build_tokenizer
from transformers import PreTrainedTokenizerBase

from torchrl_grpo.config import Config
from torchrl_grpo.data.episode import EpisodeRecord, ResponseText
from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.chat import render
from torchrl_grpo.envs.episodes.types import Step
from torchrl_grpo.envs.group_text import GroupTextEnv
from torchrl_grpo.envs.openings import Opening, opening
from torchrl_grpo.envs.responses import is_truncated, judged_texts, note_on_reading, written_texts
from torchrl_grpo.envs.stream import PromptStream
from torchrl_grpo.inference.protocol import Completion, Request, Sampling
from torchrl_grpo.rewards.format import FormatReward
from torchrl_grpo.rewards.graders import CountingGrader
from torchrl_grpo.rewards.reward_set import RewardSet
from torchrl_grpo.rollout.groups import Group, Response
from torchrl_grpo.rollout.round import score_groups
from torchrl_grpo.training.evaluator import Evaluator

EXAMPLE = Example("x", [{"role": "user", "content": "3 + 4?"}], {"answer": "7"})
PERFECT = "<think>3 and 4</think><answer>7</answer>"
EMPTY = "<think>\n\n</think>\n\n"


def completion(tokenizer: PreTrainedTokenizerBase, text: str) -> Completion:
    ids = tokenizer(text + "<|im_end|>", add_special_tokens=False)["input_ids"]
    return Completion(ids, [0.0] * len(ids), "stop")


class Words:
    """A reward set that remembers what it read. The score is that of the format."""

    names = ("format",)

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.rewards = RewardSet([(FormatReward(), 1.0)])

    def score(self, texts: list[str], examples: list[Example]) -> Any:
        self.texts += texts
        return self.rewards.score(texts, examples)


def environment(tokenizer: PreTrainedTokenizerBase, repeats: int = 1, **options: Any) -> Any:
    rewards: Any = Words()
    stream = PromptStream([EXAMPLE], 0)
    return GroupTextEnv(
        stream, tokenizer, rewards, num_envs=1, repeats=repeats, max_prompt_tokens=99, **options
    )


@pytest.mark.parametrize(
    ("prompt", "block", "opened"),
    [
        ("assistant\n<think>", "", "<think>"),
        ("assistant\n<think>\n", "", "<think>\n"),
        ("step by step.\n<think> ", "", "<think> "),
        (f"assistant\n{EMPTY}", EMPTY, ""),
        ("assistant\n<think></think>", "<think></think>", ""),
        ("<think>\nI know.\n</think>\n\n", "<think>\nI know.\n</think>\n\n", ""),
        (f"assistant\n{EMPTY}<answer>", EMPTY, "<answer>"),
        ("<answer>\n", "", "<answer>\n"),
        ("[THINK]", "", "[THINK]"),
        ("<seed:think>\n", "", "<seed:think>\n"),
        ("<think >\n", "", "<think >\n"),
        ("<THINK>", "", "<THINK>"),
        ("◁think▷", "", "◁think▷"),
        ("<|channel>thought\n", "", "<|channel>thought\n"),
        ("<|channel>thought\n<channel|>", "", ""),
        ("<|channel|>analysis<|message|>", "", "<|channel|>analysis<|message|>"),
        ("Write <think> and </think>, then <answer> and </answer>.<|im_end|>\nassistant\n", "", ""),
        ("Write thoughts between <think> and </think>", "", ""),
        ("Begin with <think>\nASSISTANT:", "", ""),
        ("<assistant>\n", "", ""),
        ("</think>", "", ""),
        ("", "", ""),
    ],
)
def test_what_a_prompt_has_written(prompt: str, block: str, opened: str) -> None:
    assert opening(prompt) == Opening(block, opened)


@pytest.mark.parametrize(
    ("opened", "closed"),
    [
        ("<think >\n", "</think >"),
        ("[THINK]", "[/THINK]"),
        ("◁think▷", "◁/think▷"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<|channel>thought\n", "<channel|>"),
        ("<|channel|>analysis<|message|>", "<|end|>"),
        ("<answer>", "</answer>"),
    ],
)
def test_the_tag_that_closes_what_a_prompt_has_opened(opened: str, closed: str) -> None:
    assert opening(opened).pairs == [(opened.strip(), closed)]


@pytest.mark.parametrize("opened", ["", "<think>", "<think>\n", EMPTY, "<think></think>", EMPTY + "<answer>"])
@pytest.mark.parametrize(
    "tags", [(), ("<think>", "</think>"), ("<think>", "</think>", "<answer>", "</answer>")]
)
@pytest.mark.parametrize("special", [True, False])
def test_a_perfect_response_earns_1_and_a_doubled_tag_less(
    opened: str, tags: Sequence[str], special: bool
) -> None:
    tokenizer = build_chatml(opened, tags=tags, special=special)
    start = opening(opened)
    perfect, doubled = start.continued(PERFECT), PERFECT
    prompt = render(tokenizer, EXAMPLE)[1]
    env = environment(tokenizer, 2)
    # A group of a collector.
    answers = [completion(tokenizer, text) for text in (perfect, doubled)]
    group = Group(0, prompt, 0, [Response(answer.token_ids, finish_reason="stop") for answer in answers])
    (scored,) = score_groups(env, tokenizer, groups=[group], examples=[EXAMPLE])
    scores = [score.total for score in scored.scores]
    assert scores[0] == 1.0 and (scores[1] < 1.0 or not opened)
    assert scored.texts == [perfect, doubled], "the record has what the model wrote"
    assert env.reward_set.texts == [start.opened + perfect, start.opened + doubled]
    # The texts of another policy.
    assert [score.total for score in env.score([perfect + "<|im_end|>", doubled], [EXAMPLE] * 2)] == scores
    env.reset()
    data = TensorDict({}, [1, 2]).set(("text", "response"), NonTensorStack.from_list([[perfect, doubled]]))
    assert env.step(data)["next", "reward"].flatten().tolist() == pytest.approx(scores)
    # An evaluation.
    grade = SimpleNamespace(
        primary="right",
        metrics=("right",),
        grade=lambda text, example, score: {"right": FormatReward()(text, example)["score"]},
        weights=lambda example: {"right": 1.0},
        close=lambda: None,
    )
    engine: Any = SimpleNamespace(generate=lambda prompts, sampling: [[answers[0]]])
    evaluator = Evaluator([EXAMPLE], tokenizer, CountingGrader(grade), Config())
    assert evaluator(engine).metrics["eval/accuracy"] == 1.0


TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def test_rewards_read_tags_that_are_special_tokens() -> None:
    tokenizer = build_chatml("", tags=TAGS, special=True)
    tokenizer.pad_token = "<|im_start|>"
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    whole = completion(tokenizer, PERFECT)
    # Cut at its last tag, padded, and ended by another token of the model.
    cut = Completion(whole.token_ids[:-1], [], "length")
    padded = Completion([*whole.token_ids, pad, pad], [], "length")
    other = Completion([*whole.token_ids[:-1], tokenizer.convert_tokens_to_ids("<|im_start|>")], [], "stop")
    empty = [Completion([], [], "length"), Completion([end], [], "stop")]
    for read in (judged_texts, written_texts):
        assert read(tokenizer, [whole, cut, padded, other, *empty]) == [PERFECT] * 4 + ["", ""]
    env = environment(tokenizer, input_mode="text")
    texts = [PERFECT, PERFECT + "<|im_end|>", PERFECT + "<|im_end|><|im_start|><|im_start|>", "<answer>"]
    env.score(texts, [EXAMPLE] * 4)
    assert env.reward_set.texts == [PERFECT] * 3 + ["<answer>"]
    data = TensorDict(
        {"tokens": {"response": torch.tensor([whole.token_ids[:-1], whole.token_ids[1:]])}}, [2]
    )
    assert is_truncated(data, tokenizer, len(whole.token_ids) - 1) == [True, False]


def test_the_tokens_with_which_a_template_ends_a_message_are_no_part_of_a_response() -> None:
    special = ["<|start|>", "<|end_response|>", "<|end|>"]
    tokenizer = build_tokenizer("bytes", special)
    tokenizer.chat_template = (
        "{% for m in messages %}<|start|>{{ m.content }}<|end_response|><|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>{% endif %}"
    )
    ids = tokenizer("<|start|>7<|end_response|><|end|>", add_special_tokens=False)["input_ids"]
    for end in (len(ids), -1):
        assert judged_texts(tokenizer, [Completion(ids[:end], [], "length")]) == ["<|start|>7"]
    # A template that renders no message of the assistant ends none.
    tokenizer.chat_template = "{{ raise_exception('no') if messages | length > 1 }}"
    assert judged_texts(tokenizer, [Completion(ids, [], "stop")]) == ["<|start|>7<|end_response|>"]


class Told(Talk):
    """Remembers what it was told, and goes on."""

    messages: list[str]

    def step(self, message: str) -> Step:
        Told.messages.append(message)
        return Step([{"role": "user", "content": "again"}])


class Script:
    """An engine that answers from a script."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> None:
        self.answers = [completion(tokenizer, text) for text in texts]
        self.requests: list[Request] = []
        self.seen: list[Request] = []

    def submit(self, requests: Sequence[Request]) -> None:
        self.requests += requests
        self.seen += requests

    def step(self) -> list[tuple[Any, Completion]]:
        return [(self.requests.pop().key, self.answers.pop(0))] if self.requests else []


@pytest.mark.parametrize("opened", ["<think>\n", EMPTY])
def test_environments_and_the_record_of_an_episode_have_what_the_prompt_opened(opened: str) -> None:
    tokenizer = build_chatml(opened, tags=TAGS, special=True)
    start = opening(opened)
    replies = [start.continued(PERFECT), start.continued(PERFECT.replace("7", "8"))]
    Told.messages = []
    inner: Any = Script(tokenizer, replies)
    engine = talking(inner, tokenizer, max_turns=2, environment=Told)
    prompt = render(tokenizer, EXAMPLE)[1]
    ((episode,),) = engine.generate([prompt], Sampling(1, 400, 1.0, seeds=[1], problems=[EXAMPLE]))
    assert episode.record is not None
    assert Told.messages == episode.record.messages_of_model == [start.opened + reply for reply in replies]
    (judged,) = judged_texts(tokenizer, [episode], [prompt])
    assert judged.record is episode.record and FormatReward()(judged, EXAMPLE)["score"] == 1.0
    # Only the tokens of the model are sampled.
    own = [token for token, sampled in zip(episode.token_ids, episode.sampled or [], strict=True) if sampled]
    assert own == [token for text in replies for token in completion(tokenizer, text).token_ids]


def test_a_call_in_thoughts_that_the_prompt_has_opened_is_none() -> None:
    tokenizer = build_chatml("<think>\n")
    (text,) = judged_texts(
        tokenizer, [completion(tokenizer, "a <tool_call>{}</tool_call>")], [render(tokenizer, EXAMPLE)[1]]
    )
    assert text.startswith("<think>\na <tool_call>")


def test_responses_travel_between_processes() -> None:
    record = EpisodeRecord(block=EMPTY)
    for text in (ResponseText("a", EMPTY), ResponseText("a", EMPTY, record)):
        copy = pickle.loads(pickle.dumps(text))
        assert copy == "a" and copy.block == EMPTY and copy.record == text.record and type(copy) is type(text)
    assert json.dumps(ResponseText("a", EMPTY)) == '"a"'


def test_the_start_says_what_rewards_read_in_a_special_way() -> None:
    tokenizer = build_chatml("<think>\n", tags=TAGS, special=True)
    note = note_on_reading(tokenizer, render(tokenizer, EXAMPLE)[0])
    assert "'<think>\\n', which rewards read as the start" in str(note)
    assert "the special tokens </answer>, </think>, <answer>, <think> as text" in str(note)
    assert "need none for `format`" in str(note_on_reading(build_chatml(EMPTY), "assistant\n" + EMPTY))
    assert note_on_reading(build_chatml(""), "assistant\n") is None
