"""``python -m torchrl_grpo.rewards``: stored completions in, scores out."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchrl_grpo.rewards.cli import main

ROOT = Path(__file__).resolve().parents[2]
GSM8K = [
    {"question": "q1", "answer": "48+24\n#### 72", "completion": "<think>a</think><answer>72</answer>"},
    {"question": "q2", "answer": "#### 1,234", "completion": "It is 1234."},
    {"question": "q3", "answer": "#### 5", "completion": ""},
]


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_the_documented_command(tmp_path: Path) -> None:
    path = write(tmp_path / "completions.jsonl", GSM8K)
    command = [sys.executable, "-m", "torchrl_grpo.rewards", "--dataset", "gsm8k", path]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    scores = lines(done.stdout)
    assert [score["total"] for score in scores] == pytest.approx([1.1, 0.0, 0.0])
    assert scores[1]["parts"]["gsm8k/flexible"] == 1.0
    assert [score["errors"] for score in scores] == [{}, {}, {}]
    assert done.stderr.splitlines() == [
        f"scoring 3 completions of {path} as gsm8k",
        "  total           mean 0.3667   n 3",
        "  gsm8k           mean 0.3333   n 3",
        "  gsm8k/strict    mean 0.3333   n 3",
        "  gsm8k/flexible  mean 0.6667   n 3",
        "  format          mean 0.3333   n 3",
        "  format/tags     mean 0.3333   n 3",
        "  format/exact    mean 0.3333   n 3",
    ]


def test_files_of_the_working_directory_are_no_modules_of_python(tmp_path: Path) -> None:
    for name in ("math", "queue", "random", "statistics", "tokenize", "dataclasses", "typing"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('a file of the user')\n")
    write(tmp_path / "completions.jsonl", GSM8K)
    command = [sys.executable, "-m", "torchrl_grpo.rewards", "--dataset", "gsm8k", "completions.jsonl"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0 and len(lines(done.stdout)) == 3, done.stderr


def test_stdin_and_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = "".join(json.dumps(row) + "\n" for row in GSM8K).encode()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    output = tmp_path / "scores.jsonl"
    assert main(["--dataset", "gsm8k", "-", "--output", str(output), "--weight", "gsm8k=2"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("scoring 3 completions of stdin as gsm8k\n")
    assert [score["total"] for score in lines(output.read_text())] == [2.0, 0.0, 0.0]


def test_jsonl_fields_and_plain_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.jsonl", [{"frage": "f", "antwort": "Rom", "completion": "rom"}])
    fields = ["--field", "question=frage", "--field", "answer=antwort"]
    assert main(["--dataset", "jsonl", *fields, "--answer-format", "plain", path]) == 0
    assert lines(capsys.readouterr().out) == [{"total": 1.0, "parts": {"exact_match": 1.0}, "errors": {}}]


def test_the_responses_of_a_run_are_scored_as_it_wrote_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(
        "def size(prompts, completions, **columns):\n    return [len(completions[0])]\n"
    )
    row = {
        "step": 1,
        "prompt": "<|im_start|>user\nHi<|im_end|>\n",
        "response": "four",
        "reward": 9.0,
        "rewards": {},
    }
    path = write(tmp_path / "rollouts.jsonl", [row])
    assert main(["--dataset", "jsonl", "--function", f"size={tmp_path}/own.py:size", path]) == 0
    assert [score["total"] for score in lines(capsys.readouterr().out)] == [4.0]


@pytest.mark.slow
def test_reasoning_gym_entries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry = {"question": "1 + 2 =", "answer": "3", "metadata": {}, "completion": "<answer>3</answer>"}
    path = write(tmp_path / "a.jsonl", [entry])
    options = ["--dataset", "reasoning_gym", "--task", "chain_sum", "--task-args", '{"max_terms": 3}']
    assert main([*options, "--timeout", "20", path]) == 0
    assert [score["total"] for score in lines(capsys.readouterr().out)] == [1.0]


def test_ifeval_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "key": 1,
        "prompt": "Write without commas.",
        "instruction_id_list": ["punctuation:no_comma"],
        "kwargs": [{}],
    }
    path = write(
        tmp_path / "a.jsonl", [{**row, "completion": "No commas"}, {**row, "completion": "One, comma"}]
    )
    assert main(["--dataset", "ifeval", path]) == 0
    assert [score["total"] for score in lines(capsys.readouterr().out)] == [1.0, 0.0]


@pytest.mark.slow
def test_a_reward_that_fails_is_in_the_line_and_does_not_fail_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a.jsonl", [{"problem": "p", "answer": "$", "completion": "3"}])
    options = ["--dataset", "math", "--weight", "math_verify=1", "--on-error", "-1", "--timeout", "20"]
    assert main([*options, path]) == 0
    shown = capsys.readouterr()
    assert "  math_verify  mean -1.0000   n 1   1 errors\n" in shown.err
    [score] = lines(shown.out)
    assert score["total"] == -1.0 and "cannot parse the truth" in score["errors"]["math_verify"]


ROW = GSM8K[0]


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        ([], [], ["is empty"]),
        (
            [{"question": "q", "text": "t"}],
            [],
            ["row 1", "'text'; rename the column of the text to completion"],
        ),
        ([{"question": "q", "response": None}], [], ["row 1", "'response' is NoneType"]),
        ([{**ROW, "completion": 3}], [], ["row 1", "'completion'", "int"]),
        ([ROW, {"question": "q", "answer": "1", "completion": ""}], [], ["row 2", "'####'"]),
        ([{"completion": "c"}], [], ["row 1", "'question'"]),
        ([ROW], ["--weight", "nope=1"], ["reward.weights.nope", "gsm8k, format"]),
        ([ROW], ["--weight", "gsm8k=x"], ["gsm8k=x", "not a number"]),
        ([ROW], ["--weight", "gsm8k"], ["--weight 'gsm8k'", "NAME=VALUE"]),
        ([ROW], ["--task-args", "{"], ["--task-args '{'", "not JSON"]),
        ([ROW], ["--task-args", "3"], ["--task-args '3'", "not a JSON object"]),
        ([ROW], ["--timeout", "0"], ["--timeout 0"]),
        ([ROW], ["--workers", "0"], ["--workers 0"]),
        ([ROW], ["--output", "no/such/folder/out.jsonl"], ["--output", "cannot be written"]),
    ],
)
def test_mistakes_end_with_2_and_say_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[Any], options: list[str], words: list[str]
) -> None:
    path = write(tmp_path / "completions.jsonl", rows)
    assert main(["--dataset", "gsm8k", *options, path]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("error: ")
    for word in words:
        assert word in shown.err


def test_a_missing_file_and_a_wrong_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dataset", "gsm8k", str(tmp_path / "nowhere.jsonl")]) == 2
    assert "nowhere.jsonl' is not a file" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["--dataset", "gsm9k", "-"])
    assert caught.value.code == 2
    assert "gsm9k" in capsys.readouterr().err
