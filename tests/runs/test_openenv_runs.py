"""Whole runs whose episodes are played on an OpenEnv server."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_openenv import FakeOpenEnv
from test_episode_runs import talk  # noqa: F401  fixture
from tiny_runs import Runner, config, train  # noqa: F401  fixtures

from torchrl_grpo.config import Config
from torchrl_grpo.tools.verify_resume import read

pytestmark = pytest.mark.slow


@pytest.fixture
def server() -> Iterator[FakeOpenEnv]:
    with FakeOpenEnv() as server:
        yield server


@pytest.fixture
def played(talk: Config, server: FakeOpenEnv) -> Config:
    talk.env.dataset = "torchrl_grpo.envs.episodes.openenv.problems:seeds"
    talk.env.task_args = {"size": 24, "held_out": 6}
    talk.env.environment, talk.env.tools = f"openenv:{server.url}", []
    talk.env.tool_timeout_s = 60.0
    return talk


def on_server(server: FakeOpenEnv) -> Counter[str]:
    """Return the episodes on a server: what each began with, its messages and the sum of its rewards."""
    episodes = Counter[str]()
    for session in server.sessions:
        steps = [
            (data["message"], answer["data"]["reward"])
            for kind, data, answer in session.sent
            if kind == "step"
        ]
        if steps:
            messages, rewards = zip(*steps, strict=True)
            episodes[json.dumps([f"seed {session.seed}", *messages, round(sum(rewards), 6)])] += 1
    return episodes


def in_run(folder: Path) -> Counter[str]:
    """Return the same of a run, without episodes whose first message was cut off."""
    episodes = Counter[str]()
    for row in read(folder / "rollouts.jsonl"):
        messages = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        # The server does not see a message that was cut off.
        messages = messages[: len(messages) - (row["messages"][-1]["role"] == "assistant")]
        (shown,) = re.findall(r"seed \d+", row["prompt"])
        if messages:
            episodes[json.dumps([shown, *messages, round(row["reward"], 6)])] += 1
    return episodes


@pytest.mark.float32
def test_a_run_has_the_tokens_and_the_rewards_of_the_server(
    played: Config,
    server: FakeOpenEnv,
    train: Runner,
    tmp_path: Path,
) -> None:
    def trained(name: str) -> list[dict[str, Any]]:
        server.sessions.clear()
        return train(name, eval__frequency=0, eval__num_problems=0)

    lines = trained("whole")
    assert all(line["episode/failed"] == line["reward/errors"] == 0 for line in lines)
    # The engine's log-probabilities are the trainer's, turn by turn.
    assert all(abs(line["policy/logprob_diff"]) < 1e-4 for line in lines)
    assert max(line["episode/turns"] for line in lines) > 1
    assert in_run(tmp_path / "whole") == on_server(server) != Counter()
    # Sessions that end at random moments are repeated, and nobody notices.
    count = sum(len(session.sent) for session in server.sessions)
    lost = set(random.Random(0).sample(range(100, count), 10))
    numbers = iter(range(10 * count))
    server.change = lambda session, kind, answer: None if next(numbers) in lost else json.dumps(answer)
    for line, other in zip(lines, trained("disturbed"), strict=True):
        # Slow answers may change the order of sums.
        assert other == pytest.approx(line, rel=1e-4, abs=1e-5)
    assert in_run(tmp_path / "disturbed") == in_run(tmp_path / "whole")
    groups = Counter(row["group_id"] for row in read(tmp_path / "disturbed/rollouts.jsonl"))
    assert set(groups.values()) == {4} and len(groups) == 16
    next_number = next(numbers)
    assert next_number > max(lost), "not every loss happened"


def test_held_out_seeds_are_graded_by_the_server(
    played: Config,
    server: FakeOpenEnv,
    train: Runner,
    tmp_path: Path,
) -> None:
    train("run", train__total_dialog_turns=16)
    rows = read(tmp_path / "run/evaluations.jsonl")
    assert len({row["prompt"] for row in rows}) == 6
    assert all(re.search(r"seed 100000\d", row["prompt"]) for row in rows)
    rewards = {}
    for episode in on_server(server):
        *played_there, reward = json.loads(episode)
        rewards[json.dumps(played_there)] = reward
    for row in rows:
        (shown,) = re.findall(r"seed \d+", row["prompt"])
        messages = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        if row["messages"][-1]["role"] != "assistant":
            # An episode is right if its rewards add up to 1 or more.
            assert row["grade"] == (rewards[json.dumps([shown, *messages])] >= 1)


def test_episodes_that_fail_on_the_server_stop_no_run(
    played: Config,
    server: FakeOpenEnv,
    train: Runner,
    tmp_path: Path,
) -> None:
    broken = {"type": "error", "data": {"message": "it broke", "code": "EXECUTION_ERROR"}}
    server.change = lambda session, kind, answer: json.dumps(
        broken if kind == "step" and session.seed % 2 else answer
    )
    (line,) = train("run", train__total_dialog_turns=16, eval__frequency=0, eval__num_problems=0)
    errors = [
        row["errors"]["environment"] for row in read(tmp_path / "run/rollouts.jsonl") if "errors" in row
    ]
    assert 0 < len(errors) < 16 and all("it broke" in error for error in errors)
    assert line["episode/failed"] == len(errors) / 16
