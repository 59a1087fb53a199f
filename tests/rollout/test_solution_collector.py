"""Solutions go on where their prompts end: inside a tag, or after thoughts that the prompt has closed."""

from __future__ import annotations

import pytest
from tiny_tokenizers import build_chatml, build_tokenizer, trl_templates
from transformers import AddedToken

from torchrl_grpo.data.episode import ResponseText
from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.chat import render
from torchrl_grpo.envs.openings import opening
from torchrl_grpo.envs.solution_tokens import solutions
from torchrl_grpo.errors import DataError, ModelError
from torchrl_grpo.rewards.format import FormatReward
from torchrl_grpo.rollout.solutions import check_solutions

EXAMPLE = Example("x", [{"role": "user", "content": "3 + 4?"}], {"answer": "7"})
PERFECT = "<think>3 and 4</think><answer>7</answer>"
EMPTY = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("opened", ["", "<think>", "<think>\n", EMPTY, "<think></think>"])
@pytest.mark.parametrize("special", [True, False])
def test_a_solution_goes_on_where_the_prompt_ends(opened: str, special: bool) -> None:
    tokenizer = build_chatml(opened, tags=("<think>", "</think>"), special=special)
    example = Example("x", EXAMPLE.messages, solution=PERFECT)
    (solution,) = solutions(tokenizer, [example], tokenizer.eos_token_id)
    text, prompt = render(tokenizer, example)
    assert solution.text == opening(opened).continued(PERFECT)
    expected = tokenizer(text + solution.text + "<|im_end|>", add_special_tokens=False)["input_ids"]
    assert [*prompt, *solution.tokens] == expected
    tag = tokenizer.convert_tokens_to_ids("<think>")
    assert expected.count(tag) == 1
    note = check_solutions(tokenizer, [example])
    assert ("those of 1 of 1 solutions are not learned" in str(note)) == ("</think>" in opened)


@pytest.mark.parametrize(
    "name", ["deepseek_r1_distill", "qwen3_5_think", "qwen3_5_nothink", "qwen3", "glm4moe"]
)
def test_solutions_of_published_templates_have_each_tag_once(name: str) -> None:
    special = ["<|im_start|>", "<｜User｜>", "<｜Assistant｜>", "<|user|>", "<|assistant|>", "<|im_end|>"]
    tokenizer = build_tokenizer("bytes", special)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in ("<think>", "</think>")])
    template = (trl_templates() / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer.chat_template = template.replace("<｜end▁of▁sentence｜>", "<|im_end|>")
    example = Example("x", EXAMPLE.messages, solution=PERFECT)
    text = render(tokenizer, example)[0]
    (solution,) = solutions(tokenizer, [example], tokenizer.eos_token_id)
    completed = text.rpartition("3 + 4?")[2] + solution.text
    assert [completed.count(tag) for tag in ("<think>", "</think>", "<answer>", "</answer>")] == [1, 1, 1, 1]
    assert name == "qwen3_5_nothink" or "3 and 4" in completed
    start = opening(text)
    judged = ResponseText(start.opened + solution.text, start.block)
    assert FormatReward()(judged, example)["score"] == 1.0


def test_thoughts_that_a_solution_does_not_end_are_refused() -> None:
    tokenizer = build_chatml("<think>\n")
    with pytest.raises(
        DataError, match=r"ends the prompt of x with <think>, and the solution has no </think>"
    ):
        check_solutions(tokenizer, [Example("x", EXAMPLE.messages, solution="It is 7.")])
    check_solutions(tokenizer, [Example("x", EXAMPLE.messages, solution="Hm.</think>It is 7.")])


def test_a_prompt_that_opens_the_answer_needs_no_tag_in_the_solution() -> None:
    tokenizer = build_chatml("<answer>")
    chat = [{"role": "user", "content": "3 + 4? Write it between <answer> and </answer>."}]
    check_solutions(tokenizer, [Example("x", chat, solution="7</answer>")])


def test_a_template_that_leaves_out_the_solution_is_refused() -> None:
    tokenizer = build_chatml("")
    # The contents of messages are lists of parts, as for models that see images.
    parts = "{% for part in m.content %}{{ part.text }}{% endfor %}"
    tokenizer.chat_template = "{% for m in messages %}" + parts + "{% endfor %}"
    with pytest.raises(ModelError, match=r"leaves out the text of the assistant's messages.*chat_template"):
        check_solutions(tokenizer, [Example("x", EXAMPLE.messages, solution="It is 7.")])


def test_a_single_row_without_a_solution_is_to_be_corrected() -> None:
    tokenizer = build_chatml("")
    examples = [Example(f"jsonl/train/{number}", EXAMPLE.messages, solution="7") for number in (1, 2, 3)]
    examples[1] = Example("jsonl/train/2", EXAMPLE.messages, solution=" ")
    with pytest.raises(DataError, match=r"jsonl/train/2 has no solution to learn; write one into its row"):
        check_solutions(tokenizer, examples)
    with pytest.raises(DataError, match=r"name the column of solutions"):
        check_solutions(tokenizer, [examples[1]] * 3)
