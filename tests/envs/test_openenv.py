"""Episodes of OpenEnv servers: what is sent, what the model reads, and what a server can do wrong."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_openenv
import psutil
import pytest
from fake_openenv import NUMBER, TEXT, TOOLS, FakeOpenEnv
from omegaconf import OmegaConf
from process_ends import alive, error_in_time, processes_with, wait_for_end

from torchrl_grpo.checkpoints import checkpoint
from torchrl_grpo.config import Config
from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.episodes.build import check_environment, prompts_of
from torchrl_grpo.envs.episodes.offers import offer_of, open_host
from torchrl_grpo.envs.episodes.openenv import client as openenv_client
from torchrl_grpo.envs.episodes.openenv import session as openenv_session
from torchrl_grpo.envs.episodes.openenv.actions import form_of
from torchrl_grpo.envs.episodes.openenv.arguments import OpenEnvArguments
from torchrl_grpo.envs.episodes.openenv.episode import OpenEnvEpisode
from torchrl_grpo.envs.episodes.openenv.problems import seeds
from torchrl_grpo.envs.episodes.processes import EpisodeHost, EpisodeProcess
from torchrl_grpo.envs.episodes.runner import EpisodeRunner, RunnerOptions
from torchrl_grpo.envs.episodes.types import Step
from torchrl_grpo.errors import CheckpointError, ConfigError

Change = Callable[[fake_openenv.Session, str, dict[str, Any]], "str | bytes | list[str] | None"]


class Play:
    """Plays episodes of a server without a model.

    Args:
        where: URL or command of the server.
        keys: keys of ``env``.
    """

    def __init__(self, where: str, **keys: Any) -> None:
        self.cfg = Config()
        self.cfg.env.environment = f"openenv:{where}"
        for name, value in keys.items():
            setattr(self.cfg.env, name, value)
        check_environment(self.cfg)
        host = open_host(self.cfg, [])
        assert host is not None
        self.host: EpisodeHost = host
        try:
            self.offer = offer_of(self.cfg, [], host, count=1)
        except BaseException:
            host.close()
            raise
        self.options = RunnerOptions(
            {tool.name: tool for tool in self.offer.tools},
            None,
            in_own_process=True,
            host=host,
            timeout_s=self.cfg.env.tool_timeout_s,
            max_characters=self.cfg.env.max_tool_characters,
            form=self.offer.form,
        )

    def episode(self, seed: int = 7, question: str = "{observation}", **columns: Any) -> EpisodeRunner:
        example = Example(
            "x", [{"role": "user", "content": question}], columns={"reset": {"seed": seed}, **columns}
        )
        prompt = self.reset(example)
        # As the problems of a run: the prompt is the environment's, and the data set's is kept.
        return EpisodeRunner(
            self.options, Example("x", prompt, columns=example.columns, source_messages=example.messages)
        )

    def reset(self, example: Example) -> list[dict[str, str]]:
        process: EpisodeProcess = self.host.start_episode()
        try:
            payload = {"do": "reset", "example": example.plain(), "form": self.offer.form}
            return list(process.call(payload, 10.0))
        finally:
            process.close()

    def failure(self, message: str = "abcd") -> str:
        """Return why an episode fails when the model writes a message."""
        runner = self.episode()
        runner.step(message)
        runner.close()
        assert runner.record.error is not None
        return runner.record.error


@pytest.fixture
def play() -> Iterator[Callable[..., Play]]:
    plays: list[Play] = []

    def make(where: str, **keys: Any) -> Play:
        plays.append(Play(where, **keys))
        return plays[-1]

    yield make
    for entry in plays:
        entry.host.close()


@pytest.fixture(scope="module")
def of_module() -> Iterator[tuple[FakeOpenEnv, Play]]:
    with FakeOpenEnv() as server:
        played = Play(server.url)
        yield server, played
        played.host.close()


@pytest.fixture
def text(of_module: tuple[FakeOpenEnv, Play]) -> tuple[FakeOpenEnv, Play]:
    """A server whose actions are texts, as it is without a change, and its episodes."""
    server, _ = of_module
    server.change = replaced()
    server.sessions.clear()
    return of_module


def test_an_episode_is_a_session_whose_answers_the_model_reads(play: Callable[..., Play]) -> None:
    with FakeOpenEnv() as server:
        played = play(server.url, environment_args={"reset": {"level": "easy"}})
        runner = played.episode(question="Talk.")
        assert runner._example.messages[-1]["content"] == "Talk.\n\nseed 7"
        steps = [runner.step(message) for message in ("abcd", "<|im_end|>", "abcd")]
        session = server.sessions[-1]
        runner.close()
    data = {"level": "easy", "seed": 7}
    assert [(kind, data) for kind, data, _ in session.sent] == [
        ("state", None),
        ("reset", data),
        *(("step", {"message": text}) for text in ("abcd", "<|im_end|>", "abcd")),
    ]
    answers = [answer["data"] for kind, _, answer in session.sent if kind == "step"]
    assert [step.messages[0]["content"] for step in steps] == [a["observation"]["text"] for a in answers]
    assert [(step.reward, step.done) for step in steps] == [(a["reward"], a["done"]) for a in answers]
    assert runner.record.reward == sum(answer["reward"] for answer in answers)


def test_problems_are_seeds_and_held_out_ones_are_others() -> None:
    train, test = seeds("train", size=5), seeds("test", held_out=3)
    numbers = [[row["reset"]["seed"] for row in rows] for rows in (train, test)]
    assert list(map(len, numbers)) == [5, 3] and not set(numbers[0]) & set(numbers[1])


def test_a_row_without_parameters_has_a_seed_of_its_own_that_stays(text: tuple[FakeOpenEnv, Play]) -> None:
    _, played = text
    chat = [{"role": "user", "content": "Hello. {observation}!"}]
    prompts = [played.reset(Example(name, chat))[0]["content"] for name in ("a", "b", "a")]
    assert prompts[0] == prompts[2] != prompts[1]
    assert prompts[0].startswith("Hello. seed ") and prompts[0].endswith("!")


@pytest.mark.parametrize(
    ("schema", "field", "form"),
    [
        (TEXT, None, ("text", "message")),
        (NUMBER, None, ("tool", "")),
        (NUMBER, "number", ("integer", "number")),
        (TEXT, "tool", ("tool", "")),
        (TOOLS, None, ("mcp", "")),
        ({"properties": {"x": {"type": "number"}}}, "x", ("number", "x")),
        ({}, None, ("tool", "")),
    ],
)
def test_the_schema_says_what_an_action_is(
    schema: dict[str, Any], field: str | None, form: tuple[str, str]
) -> None:
    action = form_of(schema, field)
    assert (action.kind, action.field) == form


@pytest.mark.slow
def test_a_number_is_read_from_the_message(play: Callable[..., Play]) -> None:
    with FakeOpenEnv(NUMBER) as server:
        runner = play(server.url, environment_args={"action": "number"}).episode()
        reply = runner.step("none at all")
        assert (reply.messages[0]["content"], reply.reward, reply.done) == (
            "error: write a number for number",
            0,
            False,
        )
        runner.step("I guess -12, or 13.")
        runner.step("9" * 40)
        steps = [data for kind, data, _ in server.sessions[-1].sent if kind == "step"]
    assert steps == [{"number": -12}, {"number": int("9" * 18)}]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_thoughts_before_an_action_are_none() -> None:
    message = "<think>Not 3, but perhaps 4.</think>\n5 it is."
    assert form_of(TEXT, None).of_message(message) == {"message": "5 it is."}
    assert form_of(NUMBER, "number").of_message(message) == {"number": 5}
    assert form_of(TEXT, None).of_message("  x = 1") == {"message": "  x = 1"}
    assert form_of(TEXT, None).of_message("<think>cut") == {"message": "<think>cut"}


def test_the_tools_of_an_environment_are_its_actions(play: Callable[..., Play]) -> None:
    with FakeOpenEnv(TOOLS) as server:
        played = play(server.url)
        assert [tool.schema["function"]["parameters"]["required"] for tool in played.offer.tools] == [
            ["a", "b"]
        ]
        runner = played.episode()
        step = runner.step(call("add", a=1, b=1) + call("add", a=3, b=4) + call("add", a=9, b=9))
        # The right sum ends the episode, and the last call is not made.
        assert [message["content"] for message in step.messages] == ["2", "7"]
        assert step.done and step.reward == 1.0 and server.sessions[-1].steps == 2
        other = played.episode()
        step = other.step(call("add", a=1))
        assert step.messages[0]["content"].startswith("error: the argument 'b'") and not step.done
        assert other.step("I do not know.").done and other.record.error is None


def test_an_action_of_several_fields_is_a_tool(play: Callable[..., Play]) -> None:
    with FakeOpenEnv() as server:
        runner = play(server.url, environment_args={"action": "tool"}).episode()
        assert runner.step(call("act", message="abcd")).messages[0]["content"] == "dcba"
        step = runner.step(call("act", message=[1]))
        assert "no action" in step.messages[0]["content"] and not step.done
        assert runner.record.tool_errors == 1 and runner.record.error is None


def lose(*positions: int) -> Change:
    """Return a change that closes the connection at messages, counted over all sessions."""
    count = iter(range(10_000))

    def change(session: fake_openenv.Session, kind: str, answer: dict[str, Any]) -> str | None:
        return None if next(count) in positions else json.dumps(answer)

    return change


@pytest.mark.slow
def test_a_lost_session_is_opened_again_and_repeats_the_episode(text: tuple[FakeOpenEnv, Play]) -> None:
    server, played = text

    def replies(*lost: int) -> list[tuple[Any, ...]]:
        runner = played.episode()
        server.change = lose(*lost)
        steps = [runner.step(message) for message in ("one", "two", "three")]
        runner.close()
        assert runner.record.error is None
        return [(step.messages, step.reward, step.done) for step in steps]

    undisturbed = replies()
    for lost in range(5):
        assert replies(lost) == undisturbed
    assert replies(0, 2, 7, 8) == undisturbed
    # Each loss takes one session more.
    assert len(server.sessions) == 2 * 7 + 5 + 4


@pytest.mark.slow
def test_sessions_that_are_cut_at_any_moment_lose_and_double_nothing(
    text: tuple[FakeOpenEnv, Play],
) -> None:
    server, played = text
    draw, ended, cuts = random.Random(0), threading.Event(), [0]

    def played_out(runner: EpisodeRunner) -> tuple[list[Step], str | None]:
        steps = [runner.step(message) for message in ("one", "two", "three")]
        runner.close()
        return steps, runner.record.error

    def play_all() -> list[tuple[list[Step], str | None]]:
        with ThreadPoolExecutor(4) as threads:
            return list(threads.map(played_out, [EpisodeRunner(played.options, each) for each in examples]))

    def cut() -> None:
        while cuts[0] < 10 and not ended.wait(draw.uniform(0.0, 0.05)):
            cuts[0] += server.cut(draw)

    examples = [played.episode(seed)._example for seed in range(8)]
    undisturbed = play_all()
    assert not any(error for _, error in undisturbed)
    cutter = threading.Thread(target=cut)
    cutter.start()
    try:
        while cuts[0] < 10:
            for whole, (steps, error) in zip(undisturbed, play_all(), strict=True):
                # An action that is cut three times is given up.
                assert (steps, error) == whole or "closed the session" in str(error)
    finally:
        ended.set()
        cutter.join()


def test_an_environment_that_cannot_be_repeated_fails_the_episode(text: tuple[FakeOpenEnv, Play]) -> None:
    server, played = text
    runner = played.episode()

    def change(session: fake_openenv.Session, kind: str, answer: dict[str, Any]) -> str | None:
        if kind != "step":
            return json.dumps(answer)
        data = {**answer["data"], "observation": {"text": f"session {len(server.sessions)}"}, "done": False}
        return (
            None if len(server.sessions) == 2 and session.steps == 2 else json.dumps({**answer, "data": data})
        )

    server.change = change
    assert not runner.step("one").done
    assert runner.step("two").done
    assert "a new one answers the same actions otherwise" in str(runner.record.error)


def replaced(**parts: Any) -> Change:
    """Return a change that replaces parts of the answers to actions."""

    def change(session: fake_openenv.Session, kind: str, answer: dict[str, Any]) -> str:
        if kind == "step":
            answer = {**answer, "data": {**answer["data"], **parts}}
        return json.dumps(answer)

    return change


def text_of(content: str | bytes) -> Change:
    return lambda session, kind, answer: content if kind == "step" else json.dumps(answer)


HOSTILE: dict[str, tuple[Change, str]] = {
    "NaN": (replaced(reward=float("nan")), "not a finite number"),
    "infinite": (replaced(reward=10**400), "too large"),
    "words": (replaced(reward="1"), "the reward of step is '1'"),
    "list": (replaced(reward=[1]), "not 'list'"),
    "done": (replaced(done="no"), "done is 'no'"),
    "observation": (replaced(observation="text"), "the observation is 'text'"),
    "silent": (replaced(observation=None), "the observation is None"),
    "no JSON": (text_of("}{"), "is no JSON"),
    "deep": (text_of("[" * 100_000), "is no JSON"),
    "bytes": (text_of(b"\xff\xfe"), "is no JSON"),
    "no object": (text_of("[1]"), "is no JSON object"),
    "no data": (text_of('{"type": "observation"}'), "has no data"),
    "pushed": (
        text_of('{"type": "pong", "data": {"observation": {"text": "x"}, "reward": 5, "done": false}}'),
        "the answer to step is of the type 'pong', not observation",
    ),
    "long": (text_of("x" * 5 * 2**20), "closed the session"),
    "many": (text_of(f'{{"data": [{"[]," * 2**17}[]]}}'), "has more than 262144 values"),
    "error": (
        text_of('{"type": "error", "data": {"message": "it broke", "code": "EXECUTION_ERROR"}}'),
        "it broke",
    ),
    "odd error": (text_of('{"type": "error", "data": {"message": [1], "code": {}}}'), "[1]"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_server_says_wrong_fails_the_episode_alone(text: tuple[FakeOpenEnv, Play], name: str) -> None:
    server, played = text
    server.change, why = HOSTILE[name]
    assert why in played.failure()
    server.change = replaced()
    runner = played.episode()
    assert runner.step("abcd").messages[0]["content"] == "dcba" and runner.record.error is None


def test_marks_in_a_text_are_no_values(text: tuple[FakeOpenEnv, Play]) -> None:
    server, played = text
    server.change = replaced(observation={"text": '",[\\"{' * 2**17})
    runner = played.episode()
    assert runner.step("one").messages[0]["content"].startswith('",[\\"{') and runner.record.error is None


def test_an_answer_too_many_is_not_taken_for_the_next_one(text: tuple[FakeOpenEnv, Play]) -> None:
    server, played = text
    runner, other = played.episode(), played.episode()
    refused = {"type": "error", "data": {"message": "no action", "code": "VALIDATION_ERROR"}}
    server.change = lambda session, kind, answer: (
        [json.dumps(refused)] * (kind == "step") + [json.dumps(answer)]
    )
    assert "no action" in runner.step("one").messages[0]["content"]
    server.change = replaced(reward=1.0, done=False)
    # Time for what is on its way.
    other.step("one")
    assert runner.step("two").done and runner.record.reward == 0.0
    assert "sent a message that is no answer" in str(runner.record.error)


def test_the_answers_of_an_episode_are_not_kept(text: tuple[FakeOpenEnv, Play]) -> None:
    server, _ = text
    observation = {"text": "x", "metadata": [{}] * 50_000}
    data = {"observation": observation, "reward": 0.5, "done": False}
    server.change = text_of(json.dumps({"type": "observation", "data": data}))
    arguments = OpenEnvArguments()
    episode = OpenEnvEpisode(server.url, form_of(TEXT, None), 60.0, 2_000, arguments)
    episode.reset(Example("x", [{"role": "user", "content": "-"}]))
    tracemalloc.start()
    try:
        assert [episode.step("abcd").reward for _ in range(3)] == [0.5] * 3
        assert tracemalloc.get_traced_memory()[0] < 2**21
    finally:
        tracemalloc.stop()
        episode.close()


def test_a_long_answer_is_cut_and_half_characters_are_replaced(text: tuple[FakeOpenEnv, Play]) -> None:
    server, played = text
    server.change = replaced(done=False, reward=None, observation={"text": "\ud800" + "x" * 9_000})
    step = played.episode().step("abcd")
    assert step.messages[0]["content"].startswith("?xx") and len(step.messages[0]["content"]) < 2_100
    assert step.reward == 0.0


@pytest.mark.slow
def test_a_server_that_does_not_answer_costs_the_time_of_a_call(play: Callable[..., Play]) -> None:
    ended = threading.Event()

    def hang(session: fake_openenv.Session, kind: str, answer: dict[str, Any]) -> str:
        if kind == "step":
            ended.wait(20)
        return json.dumps(answer)

    with FakeOpenEnv(change=hang) as server:
        runner = play(server.url, tool_timeout_s=1.0).episode()
        assert error_in_time(lambda: runner.step("abcd")) is None
        ended.set()
    assert str(runner.record.error).endswith(f"{server.url} did not answer in time")


@pytest.mark.slow
def test_problems_are_reset_at_the_same_time_and_keep_their_order(play: Callable[..., Play]) -> None:
    together = threading.Barrier(4, timeout=60)

    def change(session: fake_openenv.Session, kind: str, answer: dict[str, Any]) -> str:
        if kind == "reset":
            together.wait()
        return json.dumps(answer)

    with FakeOpenEnv(change=change) as server:
        played = play(server.url, tool_timeout_s=60.0)
        examples = [
            Example(f"{seed}", [{"role": "user", "content": "-"}], columns={"reset": {"seed": seed}})
            for seed in range(8)
        ]
        done = prompts_of(played.cfg, played.offer, played.host, 4)(examples)
    assert [example.messages[0]["content"] for example in done] == [f"-\n\nseed {n}" for n in range(8)]
    assert [example.id for example in done] == [example.id for example in examples]


def test_sessions_beyond_those_of_the_server_are_refused_at_the_start(play: Callable[..., Play]) -> None:
    with FakeOpenEnv(most_sessions=3) as server:
        played = play(server.url)
        with pytest.raises(
            ConfigError, match=r"room for 3 sessions, and up to 8 episodes.*max_concurrent_envs=8"
        ):
            offer_of(played.cfg, [], played.host, count=8)


def test_many_sessions_on_a_slow_server_take_more_time_than_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def answer_after_50_s(session: fake_openenv.Session, kind: str, answer: dict[str, Any]) -> str:
        now[0] += 50.0
        return json.dumps(answer)

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)
    for module in (openenv_client, openenv_session):
        monkeypatch.setattr(module, "time", clock)
    with FakeOpenEnv(change=answer_after_50_s) as server:
        client = openenv_client.OpenEnvClient(f"openenv:{server.url}", {}, 60.0, 2_000)
        assert client.describe(1_000.0, 4)["form"]["kind"] == "text" and len(server.sessions) == 4
        with pytest.raises(openenv_session.SessionLost, match="did not answer in time"):
            client.describe(120.0, 4)


SERVER = f"{sys.executable} {fake_openenv.__file__} {{port}}"


@pytest.mark.slow
def test_a_command_is_started_again_each_time_it_ends_and_ends_with_the_run(
    play: Callable[..., Play],
) -> None:
    played = play(SERVER, tool_timeout_s=30.0)
    runner = played.episode()
    runner.step("one")
    for message in ("two", "three", "four", "five"):
        process = server_of(played)
        os.kill(process, signal.SIGKILL)
        wait_for_end(process)
        # A new server knows nothing of the session, which is repeated there.
        step = runner.step(message)
        assert step.messages and not step.done and runner.record.error is None
    assert played.episode().step("one").messages
    restarted = server_of(played)
    assert restarted != process and alive(restarted)
    played.host.close()
    wait_for_end(restarted)


def server_of(played: Play) -> int:
    """Return the process id of the server that a run has started."""
    own = {child.pid for child in psutil.Process(played.host._process.pid).children(recursive=True)}
    (server,) = processes_with(fake_openenv.__file__) & own
    return server


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "why"),
    [
        (f"{sys.executable} -c 'raise SystemExit(3)' {{port}}", "the command has ended"),
        ("no-such-program {port}", "there is no program no-such-program"),
        ("http://127.0.0.1:9", "cannot be reached"),
    ],
)
def test_a_server_that_is_not_there_is_refused_at_the_start(
    play: Callable[..., Play], where: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        play(where, tool_timeout_s=1.0)


@pytest.mark.parametrize(
    ("key", "before", "now", "is_free"),
    [
        ("environment", "openenv:http://a:1", "openenv:https://b:2/x", True),
        ("environment", "openenv:http://a:1", "openenv:python b.py {port}", False),
        ("environment", "openenv:python a.py {port}", "openenv:python b.py {port}", False),
        ("tools", ["calculator", "mcp:http://a/mcp"], ["calculator", "mcp:http://b/mcp"], True),
        ("tools", ["mcp:http://a/mcp"], ["mcp:http://b/mcp", "calculator"], False),
        ("tools", ["python", "mcp:http://a/mcp"], ["calculator", "mcp:http://b/mcp"], False),
    ],
)
def test_a_resumed_run_may_have_its_servers_elsewhere(
    tmp_path: Path, key: str, before: Any, now: Any, is_free: bool
) -> None:
    folder = tmp_path / "run/checkpoints/4"
    folder.mkdir(parents=True)
    saved, resumed = Config(), Config()
    setattr(saved.env, key, before)
    setattr(resumed.env, key, now)
    OmegaConf.save(OmegaConf.structured(saved), folder / "config.yaml")
    refusal = contextlib.nullcontext() if is_free else pytest.raises(CheckpointError, match=f"env.{key}=")
    with refusal:
        checkpoint.check_same_run(folder, resumed)


def test_arguments_of_the_wrong_kind_are_refused() -> None:
    cfg = Config()
    cfg.env.environment = "openenv:http://127.0.0.1:9"
    for arguments, why in (
        ({"action": 3}, "environment_args.action=3: it is not the name of a field"),
        ({"observation": [1]}, "it is not a list of fields"),
        ({"observation": None}, "it is not a list of fields"),
        ({"reset": 1}, "it is not a mapping of parameters"),
        ({"seed": 1}, "cannot be given these arguments"),
    ):
        cfg.env.environment_args = arguments
        with pytest.raises(ConfigError, match=why):
            check_environment(cfg)


def test_a_schema_that_is_none_is_refused(play: Callable[..., Play]) -> None:
    with FakeOpenEnv() as server:
        played = play(server.url)

        def offers(schema: Any) -> int:
            server.schema = schema
            return len(offer_of(played.cfg, [], played.host).tools)

        schemas: list[Any] = [
            [],
            {"action": []},
            {"action": {"properties": 3}},
            {"action": {"required": "x"}},
        ]
        for schema in schemas:
            with pytest.raises(ConfigError, match="/schema"):
                offers(schema)
        assert offers({"action": {"properties": {"x": {"type": "string", "description": 3}}}}) == 1
        with pytest.raises(ConfigError, match="the name of a parameter"):
            offers({"action": {"properties": {"<x>": {"type": "string"}}}})
