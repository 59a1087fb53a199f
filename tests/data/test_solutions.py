"""The solution of a problem, as supervised fine-tuning learns it: in the format that the prompt asks for."""

from __future__ import annotations

from typing import Any

import pytest

from torchrl_grpo.config.schema import EnvConfig
from torchrl_grpo.config.values import AnswerFormat
from torchrl_grpo.data import gsm8k, jsonl, math, reasoning_gym
from torchrl_grpo.data.ifeval import load as ifeval
from torchrl_grpo.data.rows.sources import Row
from torchrl_grpo.errors import DataError
from torchrl_grpo.rewards.extract import answer

GSM8K = {
    "question": "How many?",
    "answer": "She sold 48/2 = <<48/2=24>>24 clips.\n48+24 = <<48+24=72>>72\n#### 72",
}
MATH = {"problem": "What?", "solution": "Half of 8 is $\\boxed{4}$."}
SUM = {"question": "Calculate 3 + 4.", "answer": "7", "metadata": {"expression": "3 + 4"}}
CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello to you."}]


def row(values: dict[str, Any]) -> Row:
    return Row(values, 1, "rows")


def env(answer_format: str, **more: Any) -> EnvConfig:
    return EnvConfig(answer_format=AnswerFormat(answer_format), **more)


@pytest.mark.parametrize(
    ("answer_format", "solution"),
    [
        ("tags", "<think>She sold 48/2 = 24 clips.\n48+24 = 72</think><answer>72</answer>"),
        ("plain", "She sold 48/2 = 24 clips.\n48+24 = 72\n#### 72"),
    ],
)
def test_gsm8k_has_its_steps_without_the_calculator(answer_format: str, solution: str) -> None:
    assert gsm8k.example(row(GSM8K), env(answer_format), "x").solution == solution


@pytest.mark.parametrize(
    ("values", "answer_format", "solution"),
    [
        (MATH, "tags", "<think>Half of 8 is $\\boxed{4}$.</think><answer>4</answer>"),
        (MATH, "plain", "Half of 8 is $\\boxed{4}$."),
        ({"problem": "What?", "answer": "4"}, "plain", "4"),
        ({"problem": "What?", "answer": "4"}, "tags", "<answer>4</answer>"),
    ],
)
def test_math_has_its_solution_or_its_answer(
    values: dict[str, Any], answer_format: str, solution: str
) -> None:
    assert math.example(row(values), env(answer_format), "x").solution == solution


@pytest.mark.parametrize(
    ("answer_format", "solution"),
    [("equation", "3 + 4 = 7"), ("plain", "7"), ("tags", "<think>3 + 4</think><answer>7</answer>")],
)
def test_an_equation_has_its_expression(answer_format: str, solution: str) -> None:
    task = env(answer_format, dataset="reasoning_gym", task="basic_arithmetic")
    assert reasoning_gym.example(row(SUM), task, "x").solution == solution
    # What is learned is what the reward takes for right.
    assert answer(solution, answer_format) == "7"


@pytest.mark.parametrize(
    ("values", "fields", "solution"),
    [
        ({"question": "a", "answer": 4}, {}, "4"),
        ({"question": "a", "answer": "4", "solution": "Two and two."}, {}, "Two and two."),
        ({"q": "a", "why": "Because."}, {"question": "q", "solution": "why"}, "Because."),
        ({"question": "a"}, {}, ""),
        ({"chat": CHAT}, {"messages": "chat"}, "Hello to you."),
        ({"chat": CHAT[:1], "answer": "Hi."}, {"messages": "chat"}, "Hi."),
        ({"chat": CHAT, "why": "Because."}, {"messages": "chat", "solution": "why"}, "Because."),
    ],
)
def test_rows_of_ones_own(values: dict[str, Any], fields: dict[str, str], solution: str) -> None:
    example = jsonl.example(row(values), env("plain", dataset="jsonl", fields=fields), "x")
    assert example.solution == solution
    assert example.messages[-1]["role"] == "user"


def test_a_column_that_nobody_named_may_be_anything_and_a_named_one_is_text() -> None:
    values = {"question": "a", "answer": "5", "solution": None, "why": 4}
    assert jsonl.example(row(values), env("plain", dataset="jsonl"), "x").solution == "5"
    named = env("plain", dataset="jsonl", fields={"solution": "why"})
    with pytest.raises(DataError, match="why"):
        jsonl.example(row(values), named, "x")


def test_a_solution_is_written_in_the_tags_that_the_prompt_asks_for() -> None:
    values = {"question": "a", "answer": "5", "solution": "Two and three."}
    example = jsonl.example(row(values), env("tags", dataset="jsonl"), "x")
    assert example.solution == "<think>Two and three.</think><answer>5</answer>"
    tagged = {**values, "solution": "<think>2 + 3</think><answer>5</answer>"}
    assert jsonl.example(row(tagged), env("tags", dataset="jsonl"), "x").solution == tagged["solution"]


def test_instructions_have_no_solution() -> None:
    values = {
        "key": 1,
        "prompt": "No commas.",
        "instruction_id_list": ["punctuation:no_comma"],
        "kwargs": [{}],
    }
    assert ifeval.example(row(values), env("tags", dataset="ifeval"), "x").solution == ""
