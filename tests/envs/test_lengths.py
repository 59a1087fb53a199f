"""Prompts that are too long: left out or cut, and what is left of a prompt that was cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
from tiny_runs import Runner, config, train  # noqa: F401  fixtures
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from torchrl_grpo.config import Config
from torchrl_grpo.config.values import OverlongPrompts
from torchrl_grpo.data import prompts
from torchrl_grpo.data.example import Example
from torchrl_grpo.data.problems import Problems
from torchrl_grpo.envs import lengths
from torchrl_grpo.envs.chat import render
from torchrl_grpo.errors import DataError


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model_dir)


def settings(how: str, bound: int, **env: str) -> Config:
    cfg = Config()
    cfg.env.overlong_prompts, cfg.env.dataset = OverlongPrompts(how), "jsonl"
    for name, value in env.items():
        setattr(cfg.env, name, value)
    cfg.inference_model.max_new_tokens, cfg.inference_model.max_model_len = 10, bound + 10
    return cfg


def problems(cfg: Config, train: Sequence[str], held_out: Sequence[str]) -> Problems:
    def made(split: str, questions: Sequence[str]) -> list[Example]:
        return [
            Example(f"{split}/{i}", prompts.messages(cfg.env, "jsonl", question))
            for i, question in enumerate(questions, 1)
        ]

    return Problems(made("train", train), made("test", held_out))


def tokens(tokenizer: PreTrainedTokenizerBase, cfg: Config, question: str) -> int:
    return len(render(tokenizer, Example("x", prompts.messages(cfg.env, "jsonl", question)))[1])


LONG = " ".join(f"word{n}" for n in range(60))
OTHER = LONG.replace("word0", "bird0")


def test_what_fits_and_what_is_an_error_pass_as_they_are(tokenizer: PreTrainedTokenizerBase) -> None:
    cfg = settings("error", 10)
    original = problems(cfg, [LONG, "short"], [OTHER])
    assert lengths.handle_overlong_prompts(original, tokenizer, cfg) == (original, None)
    for how in ("drop", "truncate_left"):
        cfg = settings(how, max(tokens(tokenizer, cfg, question) for question in (LONG, OTHER)))
        assert lengths.handle_overlong_prompts(original, tokenizer, cfg) == (original, None)


def test_problems_with_long_prompts_are_left_out_and_counted(tokenizer: PreTrainedTokenizerBase) -> None:
    cfg = settings("drop", tokens(tokenizer, Config(), LONG) - 1)
    original = problems(cfg, ["one", LONG, "two", LONG + " more"], ["three", LONG + " and more"])
    fitted, note = lengths.handle_overlong_prompts(original, tokenizer, cfg)
    assert [example.id for example in fitted.train] == ["train/1", "train/3"]
    assert [example.id for example in fitted.held_out] == ["test/1"]
    assert note is not None and "2 of 4 training problems and 1 of 2 held-out ones are left out" in note
    with pytest.raises(DataError, match=r"all 1 problems to evaluate on .*max_model_len"):
        lengths.handle_overlong_prompts(problems(cfg, ["one"], [LONG]), tokenizer, cfg)
    with pytest.raises(DataError, match="all 1 problems to train on"):
        lengths.handle_overlong_prompts(problems(cfg, [LONG], []), tokenizer, cfg)


@pytest.mark.parametrize("how", ["truncate_left", "truncate_right", "truncate_middle"])
def test_only_the_question_is_cut(tokenizer: PreTrainedTokenizerBase, how: str) -> None:
    cfg = settings(how, 0, system_prompt="Be brief.", prompt_template="Q: {question} Now answer.")
    bound = tokens(tokenizer, cfg, LONG) - 40
    cfg.inference_model.max_model_len += bound
    original = problems(cfg, ["short", LONG], [OTHER + " and more"])
    fitted, note = lengths.handle_overlong_prompts(original, tokenizer, cfg)
    assert note is not None and "1 of 2 training problems and 1 of 1 held-out ones are cut" in note
    assert fitted.train[0] == original.train[0]
    for example in (fitted.train[1], fitted.held_out[0]):
        text, ids = render(tokenizer, example)
        whole = render(tokenizer, original.train[1])[0]
        assert bound - 10 <= len(ids) <= bound, "cut no further than it has to be"
        start, end = whole.split(LONG)
        assert text.startswith(start) and text.endswith(end), (
            "the template and what is around the question stay"
        )
        kept = text[len(start) : len(text) - len(end)]
        assert kept.startswith(("word0 ", "bird0 ")) == (how != "truncate_left")
        assert (" ... " in kept) == (how == "truncate_middle")
    kept = fitted.held_out[0].messages[-1]["content"]
    assert kept.endswith("more Now answer.") == (how != "truncate_right")


@pytest.mark.parametrize("how", ["truncate_left", "truncate_right"])
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_of_a_chat_only_what_the_user_said_last_is_cut(
    tokenizer: PreTrainedTokenizerBase, how: str, system: str | None
) -> None:
    cfg = settings(how, 0)
    cfg.env.system_prompt = system
    start = [] if system is None else [{"role": "system", "content": system}]
    chat = [("user", "Hello."), ("assistant", "Yes?"), ("user", LONG)]
    messages = [*start, *({"role": role, "content": content} for role, content in chat)]
    original = Problems([Example("train/1", messages, question="the whole chat")], [])
    whole = len(render(tokenizer, original.train[0])[1])
    cfg.inference_model.max_model_len += whole - 30
    fitted, _ = lengths.handle_overlong_prompts(original, tokenizer, cfg)
    assert fitted.train[0].messages[:-1] == messages[:-1]
    kept = fitted.train[0].messages[-1]["content"]
    assert kept != LONG and (LONG.endswith(kept) if how == "truncate_left" else LONG.startswith(kept))
    # Chats that only differed in what was cut off are the same problem now.
    assert kept in fitted.train[0].question and "Be brief." not in fitted.train[0].question


def test_the_request_for_tags_stays(tokenizer: PreTrainedTokenizerBase) -> None:
    cfg = settings("truncate_right", 0)
    cfg.inference_model.max_model_len += tokens(tokenizer, cfg, "") + 30
    fitted, _ = lengths.handle_overlong_prompts(problems(cfg, [LONG], []), tokenizer, cfg)
    content = fitted.train[0].messages[-1]["content"]
    assert content.startswith("word0") and content.endswith("between <answer> and </answer>.")
    cfg.inference_model.max_model_len = tokens(tokenizer, cfg, "") + 5
    with pytest.raises(DataError, match=r"train/1 has \d+ tokens without its question.* in a new run"):
        lengths.handle_overlong_prompts(problems(cfg, [LONG], []), tokenizer, cfg)


def test_questions_that_become_equal_are_not_trained_on(tokenizer: PreTrainedTokenizerBase) -> None:
    cfg = settings("truncate_right", tokens(tokenizer, Config(), LONG))
    fitted, _ = lengths.handle_overlong_prompts(
        problems(cfg, ["one", LONG + " yes"], [LONG + " no!"]), tokenizer, cfg
    )
    assert [example.id for example in fitted.train] == ["train/1"]


def test_generated_problems_are_cut_when_they_are_drawn(tokenizer: PreTrainedTokenizerBase) -> None:
    cfg = settings("truncate_right", tokens(tokenizer, Config(), LONG) - 20)
    original = problems(cfg, ["one", LONG], [])
    lazy = dataclasses.replace(original, train=tuple(original.train))
    fitted, note = lengths.handle_overlong_prompts(lazy, tokenizer, cfg)
    assert note is None and len(fitted.train) == 2 and fitted.train[0] == original.train[0]
    assert len(render(tokenizer, fitted.train[1])[1]) <= tokens(tokenizer, cfg, LONG) - 20
    assert fitted.train[:2] == [fitted.train[0], fitted.train[1]]
    # Nobody knows how many they will be.
    held_out = problems(cfg, [], ["one", LONG]).held_out
    _, note = lengths.handle_overlong_prompts(dataclasses.replace(lazy, held_out=held_out), tokenizer, cfg)
    assert note is not None and "1 of 2 held-out problems are cut" in note
    assert "training problems are cut when they are drawn" in note and "0 of" not in note


@pytest.mark.slow
@pytest.mark.parametrize("how", ["drop", "truncate_right"])
def test_one_long_prompt_does_not_end_a_run(
    how: str,
    config: Config,
    train: Runner,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with (tmp_path / "sums.jsonl").open("a") as file:
        file.write('{"question": "' + LONG * 9 + '", "answer": 3}\n')
    changes = {"env__repeats": 2, "train__total_dialog_turns": 8, "eval__num_problems": 6}
    with pytest.raises(DataError, match=r"env\.overlong_prompts=truncate_right.* env\.overlong_prompts=drop"):
        train("error", **changes)
    lines = train(how, env__overlong_prompts=how, **changes)
    assert lines[-1]["step"] == 1
    assert f"env.overlong_prompts={how}: 1 of " in capsys.readouterr().err
