"""The documentation's own files of a user's code train from the command line."""

from __future__ import annotations

import json
import math
import re
import socketserver
import threading
from pathlib import Path
from typing import Any

import pytest
from fake_judge import FakeJudge, score_length
from forked import Finished, run_script
from tiny_model import build_tiny_model
from user_files import blocks_below, train_in

pytestmark = pytest.mark.slow


def test_the_rewards_of_the_documentation_train(
    repo_root: Path, tmp_path: Path, tiny_model_dir: Path, format_words: list[str]
) -> None:
    page = repo_root / "docs" / "tasks_and_rewards.md"
    source, command = blocks_below(page, "Rewards of your own")
    assert len([line for line in source.splitlines() if line.strip()]) <= 15
    (tmp_path / "my_rewards.py").write_text(source)
    rows = [{"question": f"{a} plus {b}", "answer": str(a + b)} for a in range(6) for b in range(6)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = [
        f"model.name={tiny_model_dir}",
        "inference_model.backend=transformers",
        "inference_model.max_model_len=200",
        "inference_model.max_new_tokens=8",
        "env.num_envs=2",
        "env.repeats=4",
        "train.total_dialog_turns=16",
        "eval.num_problems=6",
        "hydra.run.dir=run",
        *format_words,
    ]
    output = train_in(tmp_path, repo_root, command, small)
    rollouts = [json.loads(line) for line in (tmp_path / "run/rollouts.jsonl").read_text().splitlines()]
    assert len(rollouts) == 16
    answers = {row["question"]: row["answer"] for row in rows}
    for row in rollouts:
        (question,) = (candidate for candidate in answers if candidate in row["prompt"])
        expected = {
            "agreement": float(answers[question] in row["response"]),
            "brevity": min(1.0, 20 / max(1, len(row["response"]))),
        }
        assert row["rewards"] == pytest.approx(expected) and "errors" not in row
        assert row["reward"] == pytest.approx(expected["agreement"] + 0.1 * expected["brevity"])
    held_out = [json.loads(line) for line in (tmp_path / "run/evaluations.jsonl").read_text().splitlines()]
    # The heaviest of the user's rewards grades. Its mean is an accuracy once 0 and 1 have occurred.
    is_verdict = {row["grade"] for row in held_out} == {0.0, 1.0}
    assert "held out: 6 problems, graded by agreement\n" in output
    assert f"held-out {'accuracy' if is_verdict else 'reward  '}" in output
    assert "graded by          agreement\n" in output
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["grader"] == "agreement"
    assert summary["accuracy_after"] == (summary["primary_after"] if is_verdict else None)
    assert [row["step"] for row in held_out] == [0] * 6 + [2] * 6
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for line, six in ((metrics[0], held_out[:6]), (metrics[-1], held_out[6:])):
        for name in ("agreement", "brevity"):
            mean = sum(row["rewards"][name] for row in six) / 6
            assert line[f"eval/reward/{name}"] == pytest.approx(mean)
        assert line["eval/primary"] == line["eval/reward/agreement"]
    assert is_verdict == ("eval/accuracy" in metrics[-1])


# A run of two steps on the tiny model.
SMALL = (
    "inference_model.backend=transformers",
    "inference_model.max_model_len=200",
    "inference_model.max_new_tokens=8",
    "env.num_envs=2",
    "env.repeats=4",
    "train.total_dialog_turns=16",
    "hydra.run.dir=run",
)
SHAPED = """
def brevity(completion, example):
    return 1 / (1 + len(completion))
"""
# Whatever the model writes, some of the held-out responses earn 0 and some earn 1.
VERDICT = """
import re

def short(prompts, completions, **columns):
    rooms = [int(re.findall("[0-9]+", prompt)[-1]) % 3 for prompt in prompts]
    return [float(room == 2 or (room == 1 and len(text) < 12)) for room, text in zip(rooms, completions)]
"""
# A reward of any number whose values are all 0 at first.
RARE = """
def rare(completion, example):
    return 0.5 * float("Welcome to this house" in completion)
"""


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("source", "name", "result", "progress"),
    [
        (SHAPED, "brevity", "held-out reward    ", "step 0/2  held-out brevity 0."),
        (VERDICT, "short", "held-out accuracy  ", "step 0/2  accuracy "),
        (RARE, "rare", "held-out reward    0.000 -> 0.000", "step 0/2  held-out rare 0.000"),
    ],
)
def test_prompts_and_a_reward_are_enough(
    repo_root: Path,
    tmp_path: Path,
    tiny_model_dir: Path,
    format_words: list[str],
    *,
    source: str,
    name: str,
    result: str,
    progress: str,
) -> None:
    (tmp_path / "my_reward.py").write_text(source)
    rows = [{"prompt": f"Greet the guests of room {number}."} for number in range(40)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = f"grpo env=jsonl env.data_path=prompts.jsonl reward.functions={{{name}:my_reward.py:{name}}}"
    output = train_in(tmp_path, repo_root, command, [*SMALL, f"model.name={tiny_model_dir}", *format_words])
    assert "prompts.jsonl: 8 of 40 questions are held out; eval.num_problems=N" in output
    assert f"held out: 8 problems, graded by {name}\n" in output and progress in output
    assert result in output and f"graded by          {name}\n" in output
    assert "warning: the prompt" not in output, "nothing asks for tags"
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["accuracy_after"] is None) == (name != "short") and summary["grader"] == name
    assert ("  change             +" in output) or ("  change             -" in output)
    assert ("group size: with an accuracy of " in output) == (name == "short")
    assert ("rare gave 0 for every held-out response, so its mean is reported" in output) == (name == "rare")
    first = lines(tmp_path / "run/metrics.jsonl")[0]
    values = [row["grade"] for row in lines(tmp_path / "run/evaluations.jsonl") if row["step"] == 0]
    assert first["eval/reward"] == first["eval/primary"] == pytest.approx(sum(values) / 8)
    prompts = {row["prompt"] for row in lines(tmp_path / "run/rollouts.jsonl")}
    start, end = "<|im_start|>user\nGreet the guests of room ", ".<|im_end|>\n<|im_start|>assistant\n"
    assert all(prompt.startswith(start) and prompt.endswith(end) for prompt in prompts)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("which", ["prompts.jsonl", "distill_coef"])
def test_prompts_are_enough_for_a_teacher(
    repo_root: Path, tmp_path: Path, tiny_model_dir: Path, format_words: list[str], which: str
) -> None:
    page = (repo_root / "docs/distillation.md").read_text()
    (command,) = (line for line in page.splitlines() if line.startswith("grpo ") and which in line)
    teacher = build_tiny_model(tmp_path / "teacher", seed=5)
    command = command.partition("  #")[0].replace("TEACHER", str(teacher))
    write(tmp_path / "prompts.jsonl", [{"question": f"Say {number}."} for number in range(40)])
    (tmp_path / "my_rewards.py").write_text(SHAPED)
    # The data set of the recipe is on the hub.
    data = ["env=jsonl", "env.data_path=prompts.jsonl", "reward.functions={brevity:my_rewards.py:brevity}"]
    changes = [] if which in data[1] else data
    train_in(
        tmp_path,
        repo_root,
        command,
        [*changes, *SMALL, f"model.name={tiny_model_dir}", *format_words],
    )
    steps = [line for line in lines(tmp_path / "run/metrics.jsonl") if line["step"]]
    assert all(math.isfinite(line["distill/reverse_kl"]) for line in steps)
    assert any(line["advantage/abs_mean"] > 0 for line in steps) == (which == "distill_coef")


def test_questions_and_solutions_are_enough_for_sft(
    repo_root: Path, tmp_path: Path, tiny_model_dir: Path, format_words: list[str]
) -> None:
    page = (repo_root / "docs/sft.md").read_text()
    (command,) = (line for line in page.splitlines() if line.startswith("grpo-sft ") and "solution:s" in line)
    write(
        tmp_path / "chats.jsonl", [{"q": f"Say {number}.", "s": f"It is {number}."} for number in range(40)]
    )
    small = [word for word in SMALL if word != "env.repeats=4"]
    output = train_in(tmp_path, repo_root, command, [*small, f"model.name={tiny_model_dir}", *format_words])
    assert "held out: 8 problems, graded by the loss of their solutions\n" in output
    assert "held-out loss      " in output and "(perplexity " in output
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    first, last = (lines(tmp_path / "run/metrics.jsonl")[at] for at in (0, -1))
    assert (summary["loss_before"], summary["loss_after"]) == (first["eval/loss"], last["eval/loss"])
    low, high = summary["loss_ci95"]
    assert low < last["eval/loss"] < high and f"(95 % interval {low:.3f} to {high:.3f})" in output
    assert last["eval/perplexity"] == pytest.approx(math.exp(last["eval/loss"]))


def chats(*last: dict[str, str]) -> list[dict[str, Any]]:
    """Rows with an earlier turn of the assistant, a question, and ``last``."""
    earlier = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hi."}]
    return [
        {"messages": [*earlier, {"role": "user", "content": f"Where is room {number}?"}, *last]}
        for number in range(40)
    ]


CHAT_START = "<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\nHi.<|im_end|>\n<|im_start|>user\n"


def test_chats_are_enough_for_sft(
    repo_root: Path, tmp_path: Path, tiny_model_dir: Path, format_words: list[str]
) -> None:
    write(tmp_path / "chats.jsonl", chats({"role": "assistant", "content": "Upstairs."}))
    words = [word for word in SMALL if word != "env.repeats=4"]
    script = repo_root / "sota-implementations/sft/sft.py"
    data = ["env=jsonl", "env.data_path=chats.jsonl", f"model.name={tiny_model_dir}", "eval.frequency=1"]
    done = run_script([script, *data, *words, *format_words], cwd=tmp_path)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "held out: 8 problems, graded by the loss of their solutions\n" in output
    rows = lines(tmp_path / "run/evaluations.jsonl")
    assert {row["response"] for row in rows} == {"Upstairs."}
    assert all(row["prompt"].startswith(CHAT_START) and "Upstairs" not in row["prompt"] for row in rows)
    losses = [line["eval/loss"] for line in lines(tmp_path / "run/metrics.jsonl")]
    assert losses[-1] < losses[0]


def test_chats_and_a_reward_are_enough(
    repo_root: Path, tmp_path: Path, tiny_model_dir: Path, format_words: list[str]
) -> None:
    (tmp_path / "my_reward.py").write_text(SHAPED)
    write(tmp_path / "chats.jsonl", chats())
    command = "grpo env=jsonl env.data_path=chats.jsonl reward.functions={brevity:my_reward.py:brevity}"
    output = train_in(tmp_path, repo_root, command, [*SMALL, f"model.name={tiny_model_dir}", *format_words])
    assert "held out: 8 problems, graded by brevity\n" in output and "held-out reward    " in output
    for row in lines(tmp_path / "run/rollouts.jsonl"):
        assert row["prompt"].startswith(f"{CHAT_START}Where is room ")
        assert row["prompt"].endswith("?<|im_end|>\n<|im_start|>assistant\n")
        assert row["reward"] == pytest.approx(1 / (1 + len(row["response"])))


JUDGE = """
import asyncio

async def ask(text):
    reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
    writer.write(text.encode("unicode_escape") + b"\\n")
    score = float(await reader.readline())
    writer.close()
    return score

async def judge(prompts, completions, **columns):
    return await asyncio.gather(*map(ask, completions))
"""


class Judge(socketserver.StreamRequestHandler):
    """Likes short texts."""

    def handle(self) -> None:
        self.wfile.write(b"%f\n" % (1 / len(self.rfile.readline())))


def judged(repo_root: Path, folder: Path, port: int, words: list[str]) -> Finished:
    (folder / "my_judge.py").write_text(JUDGE.replace("PORT", str(port)))
    write(folder / "prompts.jsonl", GOOD)
    data = ["env=jsonl", "env.data_path=prompts.jsonl", "reward.functions={judge:my_judge.py:judge}"]
    return run_script([repo_root / "sota-implementations/grpo/grpo.py", *data, *SMALL, *words], cwd=folder)


def test_a_judge_that_is_asked_over_the_network_trains(
    repo_root: Path, tmp_path: Path, tiny_model_dir: Path, format_words: list[str]
) -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Judge) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        words = [f"model.name={tiny_model_dir}", *format_words]
        done = judged(repo_root, tmp_path, server.server_address[1], words)
        server.shutdown()
        thread.join()
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "held out: 8 problems, graded by judge\n" in output and "held-out reward    " in output
    rows = [*lines(tmp_path / "run/rollouts.jsonl"), *lines(tmp_path / "run/evaluations.jsonl")]
    assert len(rows) == 16 + 2 * 8 and not any("errors" in row for row in rows)
    for row in rows:
        length = len(row["response"].encode("unicode_escape") + b"\n")
        assert row["rewards"]["judge"] == pytest.approx(1 / length, abs=1e-5)


def test_the_judge_of_the_documentation_trains(
    repo_root: Path, tmp_path: Path, tiny_model_dir: Path, format_words: list[str]
) -> None:
    configuration, command = blocks_below(repo_root / "docs" / "judges.md", "A judge", level=2)[:2]
    write(tmp_path / "prompts.jsonl", GOOD)
    with FakeJudge(score_length) as judge:
        address = "http://127.0.0.1:8000/v1"
        assert address in configuration
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine/judged.yaml").write_text(configuration.replace(address, judge.url))
        output = train_in(
            tmp_path, repo_root, command, [*SMALL, f"model.name={tiny_model_dir}", *format_words]
        )
    assert "held out: 8 problems, graded by quality\n" in output and "held-out reward    " in output
    rows = [*lines(tmp_path / "run/rollouts.jsonl"), *lines(tmp_path / "run/evaluations.jsonl")]
    assert len(rows) == 16 + 2 * 8 and not any("errors" in row for row in rows)
    for row in rows:
        verdict = json.loads(row["verdicts"]["quality"])
        assert row["rewards"] == {"quality": pytest.approx((verdict["score"] - 1) / 9)}
    prompt = judge.requests[0]["messages"][1]["content"]
    assert "The letter is polite, clear and short." in prompt and "Greet the guests of room" in prompt


def test_a_judge_that_is_not_there_ends_the_run_before_training(
    repo_root: Path, tmp_path: Path, tiny_model_dir: Path
) -> None:
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as unused:
        port = unused.server_address[1]
    done = judged(repo_root, tmp_path, port, [f"model.name={tiny_model_dir}", "train.total_dialog_turns=800"])
    assert done.returncode == 2
    (error,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert "all 8 responses of the first evaluation: judge with " in error
    assert "ConnectionRefusedError: " in error and "reward.functions" in error
    assert [row["step"] for row in lines(tmp_path / "run/evaluations.jsonl")] == [0] * 8


GOOD = [{"prompt": f"Greet the guests of room {number}.", "level": number} for number in range(20)]


@pytest.mark.parametrize(
    ("script", "rows", "words", "says"),
    [
        ("grpo", [*GOOD, {"text": "?"}], [], r"row 21 of rows.jsonl has no column 'question'"),
        ("grpo", [*GOOD, {"prompt": "very " * 900}], [], r"prompt of jsonl/\w+/21 has \d+ tokens"),
        ("grpo", GOOD, ["reward.functions.own=mine.py:stale"], r"needs stale, which is no column of"),
        ("grpo", GOOD, ["reward.weights={exact_match:1}"], r"jsonl/\w+/1 has no answer .* to compare with"),
        ("sft", GOOD, [], r"jsonl/\w+/1 has no solution to learn"),
    ],
)
def test_a_dry_run_refuses_what_the_run_would_refuse(
    repo_root: Path,
    tmp_path: Path,
    tiny_model_dir: Path,
    *,
    script: str,
    rows: Any,
    words: list[str],
    says: str,
) -> None:
    (tmp_path / "mine.py").write_text(
        "def fine(completion, example):\n    return 1.0\n\ndef stale(completions, stale):\n    return stale\n"
    )
    write(tmp_path / "rows.jsonl", rows)
    small = [word for word in SMALL if script == "grpo" or word != "env.repeats=4"]
    path = repo_root / f"sota-implementations/{script}/{script}.py"
    data = [
        "env=jsonl",
        "env.data_path=rows.jsonl",
        "reward.functions.own=mine.py:fine",
        f"model.name={tiny_model_dir}",
    ]
    errors = []
    for dry in ("true", "false"):
        done = run_script([path, *data, *small, *words, f"dry_run={dry}"], cwd=tmp_path)
        assert done.returncode == 2, done.stdout + done.stderr
        errors.append(next(line for line in done.stderr.splitlines() if line.startswith("error: ")))
    assert errors[0] == errors[1] and re.search(says, errors[0])
