"""Whole runs whose episodes are played on an OpenEnv server, or whose tools are those of an MCP server.

OpenEnv's own servers have an environment of their own, which ``scripts/setup_openenv.sh`` makes.
``OPENENV_PYTHON`` names its Python; without it their tests are skipped.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_openenv import FakeOpenEnv
from test_episode_runs import talk  # noqa: F401  fixture
from tiny_runs import Runner, config, train  # noqa: F401  fixtures
from user_files import blocks_below, distinct_questions, train_in

from torchrl_grpo.config import Config
from torchrl_grpo.tools.verify_resume import read

pytestmark = pytest.mark.slow
PYTHON = os.environ.get("OPENENV_PYTHON")
real = pytest.mark.skipif(PYTHON is None, reason="OPENENV_PYTHON names no environment with OpenEnv")

# Two environments of OpenEnv's own classes, which log what happened in them. Messages are counted from the
# first action on. At those that are asked for, the server kills itself or cuts the session.
GAMES = """
import contextlib, json, os, signal, socket, sys, unittest.mock, zlib
# Its page for people takes most of the start.
sys.modules["gradio"] = unittest.mock.MagicMock()
import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

kind, log, kills, port = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])

def append(name, text):
    with open(log + name, "a") as file:
        file.write(text)
        return file.tell()

def cut(peer):
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            connection = socket.socket(fileno=int(descriptor))
            try:
                if connection.getpeername() == peer:
                    connection.shutdown(socket.SHUT_RDWR)
                    append(".kills", "session\\n")
            finally:
                connection.detach()

def count(session, message):
    has_begun = os.path.exists(log + ".messages") or '"step"' in str(message.get("text"))
    is_end = message["type"] in ("websocket.close", "websocket.disconnect")
    if not has_begun or is_end or session.get("is_cut"):
        return
    what = kills.get(str(append(".messages", ".")))
    if what == "session":
        session["is_cut"] = True
        cut(session["client"])
    if what == "server":
        append(".kills", "server\\n")
        os.kill(os.getpid(), signal.SIGKILL)

async def disturbed(session, receive, send):
    async def received():
        message = await receive()
        count(session, message)
        return message

    async def sent(message):
        count(session, message)
        await send(message)

    is_session = session["type"] == "websocket"
    await app(session, received if is_session else receive, sent if is_session else send)

class Text(Action):
    message: str

class Number(Action):
    number: int
    unit: str = "m"

class Shown(Observation):
    text: str
    left: int | None = None

class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed=None, **parameters):
        self.seed, self.actions, self.rewards = seed, [], []
        return Shown(text=f"seed {seed}", metadata={"process": os.getpid()})

    def step(self, action, **parameters):
        self.actions.append(action.message if kind == "text" else action.number)
        number = zlib.crc32(json.dumps([self.seed, self.actions]).encode())
        self.rewards.append(number % 97 / 97)
        append("", json.dumps([self.seed, self.actions, self.rewards]) + "\\n")
        left, done = 3 - len(self.actions), number % 3 == 0
        return Shown(text=str(number), left=left, reward=self.rewards[-1], done=done)

app = create_app(Game, Text if kind == "text" else Number, Shown, max_concurrent_envs=64)
uvicorn.run(disturbed, host="127.0.0.1", port=port, log_level="critical")
"""


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
    # With fewer messages, losses may meet one episode so often that it is given up.
    played.train.total_dialog_turns = 64

    def trained(name: str) -> list[dict[str, Any]]:
        server.sessions.clear()
        return train(name, eval__frequency=0, eval__num_problems=0)

    lines = trained("whole")
    assert all(line["episode/failed"] == line["reward/errors"] == 0 for line in lines)
    # The engine's log-probabilities are the trainer's, turn by turn.
    assert all(abs(line["policy/logprob_diff"]) < 1e-4 for line in lines)
    assert max(line["episode/turns"] for line in lines) > 1
    assert in_run(tmp_path / "whole") == on_server(server) != Counter()
    # Sessions that end are repeated, and nobody notices. They end so far apart that none is given up.
    count = sum(len(session.sent) for session in server.sessions)
    lost = range(100, count, (count - 100) // 10)[:10]
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


@real
@pytest.mark.float32
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("kind", ["text", "number"])
def test_ten_kills_of_a_server_of_openenv_and_of_sessions_lose_and_double_nothing(
    played: Config, train: Runner, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "games.py").write_text(GAMES)
    seed = f"{os.environ.get('TEST_SEED', '0')} {kind}"
    print(f"the seed of the kills is {seed!r}")
    moments = sorted(random.Random(seed).sample(range(2, 300), 10))
    targets = random.Random(seed).sample(["server"] * 4 + ["session"] * 6, 10)
    kills = json.dumps(dict(zip(moments, targets, strict=True)))
    log = tmp_path / "log"
    words = [PYTHON, tmp_path / "games.py", kind, log, f"'{kills}'", "{port}"]
    played.env.environment = f"openenv:{' '.join(map(str, words))}"
    played.env.environment_args = {"observation": "text"}
    if kind == "number":
        played.env.environment_args = {"action": "number", "observation": ["text", "left"]}
    played.env.tool_timeout_s, played.train.total_dialog_turns = 300.0, 64
    lines = train("run", eval__frequency=0, eval__num_problems=0)
    assert all(abs(line["policy/logprob_diff"]) < 1e-4 for line in lines)
    rewards = {json.dumps([seed, actions]): sum(paid) for seed, actions, paid in map(json.loads, log.open())}
    assert (tmp_path / "log.kills").read_text().split() == targets, "not every kill happened"
    rows = read(tmp_path / "run/rollouts.jsonl")
    # An action during which the server is killed three times is given up, and counted.
    failed = [row for row in rows if "errors" in row]
    assert sum(line["episode/failed"] for line in lines) == len(failed) / 16 < 1
    assert all("closed the session" in row["errors"]["environment"] for row in failed)
    for row in (row for row in rows if "errors" not in row):
        (seed,) = re.findall(r"seed (\d+)", row["prompt"])
        messages = [message["content"] for message in row["messages"]]
        sent, heard = messages[::2], messages[1::2]
        sent = sent[: len(heard)]
        if kind == "number":
            sent = [
                text for text, answer in zip(sent, heard, strict=True) if not answer.startswith("error: ")
            ]
            sent = [int(re.search(r"[-+]?\d{1,18}", text)[0]) for text in sent]  # type: ignore[index]
        expected = rewards[json.dumps([int(seed), sent])] if sent else 0.0
        assert row["reward"] == pytest.approx(expected)
    groups = Counter(row["group_id"] for row in rows)
    assert set(groups.values()) == {4} and len(groups) == 16


SMALL = [
    "inference_model.backend=transformers",
    "inference_model.max_model_len=900",
    "inference_model.max_new_tokens=60",
    "env.num_envs=2",
    "env.repeats=4",
    "train.total_dialog_turns=16",
    "eval.num_problems=3",
    "hydra.run.dir=run",
]


@real
def test_the_openenv_server_of_the_documentation_trains(
    repo_root: Path, tmp_path: Path, tiny_model_dir: Path, format_words: list[str]
) -> None:
    (command_line,) = blocks_below(repo_root / "docs/openenv.md", "An OpenEnv environment", level=2)
    (tmp_path / "examples").symlink_to(repo_root / "examples")
    # The virtual environment that the command names.
    (tmp_path / ".venv-openenv").symlink_to(Path(str(PYTHON)).parents[1])
    train_in(tmp_path, repo_root, command_line, [f"model.name={tiny_model_dir}", *SMALL, *format_words])
    rows = read(tmp_path / "run/rollouts.jsonl")
    assert len(rows) == 16 and all("Write the word alone." in row["prompt"] for row in rows)


def test_the_mcp_server_of_the_documentation_trains(
    repo_root: Path, tmp_path: Path, tiny_model_dir: Path, format_words: list[str]
) -> None:
    page = repo_root / "docs/openenv.md"
    source, command_line = blocks_below(page, "Tools of an MCP server", level=2)
    assert len([line for line in source.splitlines() if line.strip()]) <= 20
    (tmp_path / "shop.py").write_text(source)
    questions = distinct_questions(tmp_path / "shop.py", "problems")
    assert len(questions["train"]) > 50 and not questions["train"] & questions["test"]
    (tmp_path / ".venv").symlink_to(sys.prefix)
    train_in(tmp_path, repo_root, command_line, [f"model.name={tiny_model_dir}", *SMALL, *format_words])
    rows = read(tmp_path / "run/rollouts.jsonl")
    assert len(rows) == 16 and all("Look up the price of a good." in row["prompt"] for row in rows)
