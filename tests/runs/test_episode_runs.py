"""Whole runs whose responses are episodes: synchronous, asynchronous, in ranks, resumed, with own code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from async_runs import AsyncRunner, pools  # noqa: F401  fixtures
from async_runs import train as train_async  # noqa: F401
from forked import run_script
from rank_runs import grpo_script
from tiny_runs import Runner, config, train  # noqa: F401  fixtures
from user_files import blocks_below, distinct_questions, train_in

from torchrl_grpo.config import Config
from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.episodes.shell_task import ShellTask
from torchrl_grpo.tools.verify_resume import read, unmeasured

pytestmark = pytest.mark.slow

OWN = '''
import random

def problems(split):
    for number in range(24 if split == "train" else 6):
        yield {"question": f"{split} {number}"}

def shout(text: str = "") -> str:
    """Say it loud.

    Args:
        text: What.
    """
    return text.upper() + "!"

class Talk:
    """Pays for short messages, says something after each one, and ends when it likes."""

    def reset(self, example):
        self.random = random.Random(example.id)

    def step(self, message):
        done = self.random.random() < 0.3
        reward = 1 / (1 + len(message))
        roles = self.random.choice([["user"], ["tool", "user"]])
        return [{"role": role, "content": f"{message[:3]}?"} for role in roles], reward, done
'''


@pytest.fixture
def talk(config: Config, tiny_model_dir: Path, tmp_path: Path) -> Config:
    """A model whose turns are short, because many tokens end one, in an environment of the user's."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model_dir, model)
    generation = json.loads((model / "generation_config.json").read_text())
    generation["eos_token_id"] = [generation["eos_token_id"], *range(20, 60)]
    (model / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "own.py").write_text(OWN)
    config.model.name = str(model)
    config.env.data_path = None
    config.env.dataset = f"{tmp_path}/own.py:problems"
    config.env.environment = f"{tmp_path}/own.py:Talk"
    config.env.tools = [f"{tmp_path}/own.py:shout"]
    config.env.max_turns = 4
    # Larger steps may teach this model never to end a turn.
    config.optimizer.lr = 1e-3
    config.reward.weights = {}
    config.inference_model.max_model_len, config.inference_model.max_new_tokens = 640, 40
    config.train.total_dialog_turns = 32
    return config


@pytest.mark.float32
def test_an_age_of_zero_is_the_synchronous_run_line_by_line(
    talk: Config,
    train: Runner,
    train_async: AsyncRunner,
    tmp_path: Path,
) -> None:
    together = train("sync")
    turns = [line["episode/turns"] for line in together[1:]]
    # The environment ends an episode by the name of its problem, in which the path of the test occurs.
    assert max(turns) > 1.2 and max(turns) <= 4, "one turn each tests nothing"
    assert any(line["advantage/abs_mean"] > 0 for line in together[1:])
    assert all(line["episode/failed"] == line["reward/errors"] == 0 for line in together[1:])
    # The engine's log-probabilities are the trainer's, turn by turn.
    assert all(abs(line["policy/logprob_diff"]) < 1e-4 for line in together[1:])
    ours = read(tmp_path / "sync/rollouts.jsonl")
    for update in ("drain", "in_flight"):
        apart = train_async(update, collector__max_policy_age=0, collector__weight_update=update)
        for line, other in zip(together, apart, strict=True):
            # Slow answers of the environment may change the order of sums.
            assert {name: other[name] for name in line} == pytest.approx(line, rel=1e-4, abs=1e-5)
        theirs = read(tmp_path / update / "rollouts.jsonl")
        assert [row["response"] for row in ours] == [row["response"] for row in theirs]


def test_new_weights_arrive_in_the_middle_of_episodes(
    talk: Config,
    train_async: AsyncRunner,
    tmp_path: Path,
) -> None:
    lines = train_async(
        "run",
        {"delay": 0.005},
        collector__max_policy_age=2,
        collector__weight_update="in_flight",
        inference_model__num_devices=2,
        train__total_dialog_turns=80,
        eval__frequency=0,
        eval__num_problems=0,
    )
    assert len(lines) == 5 and any(line["policy/mixed"] > 0 for line in lines), "no episode was cut"
    assert [line["episode/failed"] for line in lines] == [0] * 5
    assert max(line["episode/turns"] for line in lines) > 1


@pytest.mark.float32
def test_a_resumed_run_is_the_uninterrupted_run(talk: Config, train: Runner, tmp_path: Path) -> None:
    whole = train("run", train__checkpoint_frequency=1, checkpoint__keep=9)
    ours = read(tmp_path / "run/rollouts.jsonl")
    resumed = train("run", resume=str(tmp_path / "run/checkpoints/1"))
    for line, other in zip(whole, resumed, strict=True):
        assert other == pytest.approx(line, rel=1e-4, abs=1e-5)
    theirs = read(tmp_path / "run/rollouts.jsonl")
    assert [row["response"] for row in ours] == [row["response"] for row in theirs]


@pytest.mark.float32
def test_two_ranks_follow_one(talk: Config, train: Runner, repo_root: Path, tmp_path: Path) -> None:
    alone = train("one")
    flags = [
        f"hydra.run.dir={tmp_path}/two",
        f"model.name={talk.model.name}",
        f"env.dataset={talk.env.dataset}",
        f"env.environment={talk.env.environment}",
        f"env.tools=[{','.join(talk.env.tools)}]",
        "env.max_turns=4 env.num_envs=4 env.repeats=4 env.answer_format=plain",
        "inference_model.max_model_len=640 inference_model.max_new_tokens=40",
        "inference_model.dtype=float32",
        "inference_model.backend=transformers train_model.autocast='no' optimizer.lr=0.001",
        "optimizer.eps=0.01 eval.frequency=2 eval.num_problems=6 train.total_dialog_turns=32",
        "train.checkpoint_frequency=0 train_model.num_devices=2",
    ]
    words = [word.replace("'", '"') for flag in flags for word in flag.split(" ")]
    done = run_script([grpo_script(repo_root), *words], ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    for line, other in zip(alone, map(unmeasured, read(tmp_path / "two/metrics.jsonl")), strict=True):
        shared = {name: value for name, value in line.items() if name in other}
        assert {name: other[name] for name in shared} == pytest.approx(shared, rel=1e-3, abs=1e-4)


def test_an_environment_that_fails_is_a_counted_error(talk: Config, train: Runner, tmp_path: Path) -> None:
    # It fails on every second problem: of a random choice by name, a round may have none.
    fails = OWN.replace("done = self", "done = 1 / self.odd; done = self")
    start = "self.random = random.Random(example.id)"
    odd = "self.odd = int(example.id.rpartition('/')[2]) % 2"
    (tmp_path / "own.py").write_text(fails.replace(start, f"{start}; {odd}"))
    lines = train("run", train__total_dialog_turns=16)
    assert 0 < lines[1]["episode/failed"] < 1 and lines[1]["reward/errors"] > 0
    errors = [
        row["errors"]["environment"] for row in read(tmp_path / "run/rollouts.jsonl") if "errors" in row
    ]
    assert all("env.environment: step failed: ZeroDivisionError" in error for error in errors) and errors


SMALL = [
    "inference_model.backend=transformers",
    "inference_model.max_model_len=900",
    "inference_model.max_new_tokens=60",
    "env.num_envs=2",
    "env.repeats=4",
    "train.total_dialog_turns=16",
    "hydra.run.dir=run",
]


def test_the_environment_of_the_documentation_trains(
    repo_root: Path, tmp_path: Path, tiny_model_dir: Path, format_words: list[str]
) -> None:
    source, command_line = blocks_below(repo_root / "docs/episodes.md", "An environment of your own", level=2)
    assert len([line for line in source.splitlines() if line.strip()]) <= 30
    (tmp_path / "my_env.py").write_text(source)
    questions = distinct_questions(tmp_path / "my_env.py", "shopping")
    assert len(questions["train"]) > 90 and not questions["train"] & questions["test"]
    small = [f"model.name={tiny_model_dir}", "eval.num_problems=6", *SMALL, *format_words]
    train_in(tmp_path, repo_root, command_line, small)
    rollouts = read(tmp_path / "run/rollouts.jsonl")
    assert len(rollouts) == 16
    assert all("price" in row["prompt"] and row["rewards"].keys() == {"environment"} for row in rollouts)


def test_the_tasks_of_the_documentation_train(
    repo_root: Path, tmp_path: Path, tiny_model_dir: Path, format_words: list[str]
) -> None:
    rows, command_line = blocks_below(repo_root / "docs/episodes.md", "Tasks in a folder")
    (tmp_path / "tasks.jsonl").write_text(rows)
    small = [f"model.name={tiny_model_dir}", "env.num_envs=1", "train.total_dialog_turns=8"]
    train_in(tmp_path, repo_root, command_line, [*SMALL, *small, *format_words])
    rollouts = read(tmp_path / "run/rollouts.jsonl")
    assert len(rollouts) == 8 and all("errors" not in row for row in rollouts)
    solutions = ("awk '{ s += $1 } END { print s }' numbers.txt > sum.txt", "sort -o names.txt names.txt")
    for row, solution in zip(map(json.loads, rows.splitlines()), solutions, strict=True):
        for command, reward in (("true", 0.0), (solution, 1.0)):
            task = ShellTask()
            task.reset(Example("row", [], columns=row))
            assert task.folder.run({"command": command}, 20.0) == "" and task.step("Done.").reward == reward
            task.folder.close()
