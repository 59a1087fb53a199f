"""Tools and environments of the user, in processes that may fail in every way, and the built-in tools."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from process_ends import alive, wait_for_end

from torchrl_grpo.data.episode import ResponseText
from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.episodes.countdown import Countdown
from torchrl_grpo.envs.episodes.countdown import problems as countdown_problems
from torchrl_grpo.envs.episodes.guess import Guess
from torchrl_grpo.envs.episodes.guess import problems as guess_problems
from torchrl_grpo.envs.episodes.processes import EpisodeHost, UserCodeSpec
from torchrl_grpo.envs.episodes.runner import EpisodeRunner, RunnerOptions
from torchrl_grpo.envs.episodes.tools.calculator import calculator
from torchrl_grpo.envs.episodes.tools.registry import load_tools
from torchrl_grpo.envs.episodes.tools.tool_calls import CallReader
from torchrl_grpo.errors import ConfigError, TrainingStopped

TOOLS = '''
import asyncio, os, signal, subprocess, sys, time

def echo(text: str) -> str:
    """Say it again.

    Args:
        text: What to say.
    """
    print("this goes to the log")
    return text

async def later(text: str, seconds: float = 0.0) -> dict:
    """Say it later.

    Args:
        text: What to say.
        seconds: When.
    """
    await asyncio.sleep(seconds)
    return {"said": text}

def hang() -> str:
    """Never return."""
    while True:
        pass

def fail() -> str:
    """Raise."""
    raise KeyError("lost")

def flood() -> str:
    """Return too much."""
    return "x" * 50_000_000

def fork(path: str) -> str:
    """Leave processes behind, in this process group and out of it.

    Args:
        path: File for their numbers.
    """
    numbers = []
    for apart in (False, True):
        child = subprocess.Popen(["sleep", "1000"], start_new_session=apart)
        numbers.append(child.pid)
    with open(path, "w") as file:
        file.write(" ".join(map(str, numbers)))
    return "forked"

def surrogate() -> str:
    """Return what no tokenizer takes."""
    return "a\\ud800b"

def die() -> str:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)

def leave() -> str:
    """Exit."""
    sys.exit(3)

SERVICE = subprocess.Popen(["sleep", "1000"])
KEPT = {}

async def background(text: str = "") -> str:
    """Start a task in the first call, and say in the second what it has done.

    Args:
        text: What it does.
    """
    async def work():
        await asyncio.sleep(0)
        return text
    if "task" in KEPT:
        return await KEPT["task"]
    KEPT["task"] = asyncio.get_running_loop().create_task(work())
    return "started"

def service() -> str:
    """Say whether what the module started is there."""
    return str(SERVICE.pid)

class Counter:
    def __init__(self):
        self.count = 0

    def __call__(self, step: int) -> str:
        """Count.

        Args:
            step: How far.
        """
        self.count += step
        return str(self.count)

class Room:
    def __init__(self, limit=3):
        self.limit = limit

    def reset(self, example):
        self.said = []
        return [{"role": "user", "content": f"say something about {example.id}"}]

    def step(self, message):
        self.said.append(message)
        if message == "nonsense":
            return "what"
        if message == "hang":
            time.sleep(1000)
        if message == "as assistant":
            return [{"role": "assistant", "content": "an example"}], 0.0, False
        if message == "none":
            return [], 0.0, False
        if message == "infinite":
            return [], float("inf"), True
        return f"{len(self.said)} of {self.limit}", 0.5, len(self.said) == self.limit
'''
NAMES = ["echo", "later", "hang", "fail", "flood", "fork", "surrogate", "die", "leave", "Counter"]
NAMES += ["background", "service"]
EXAMPLE = Example("room/1", [{"role": "user", "content": "say something about room/1"}])

MakeRunner = Callable[..., EpisodeRunner]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "my_tools.py"
    path.write_text(TOOLS)
    return path


@pytest.fixture(scope="module")
def host(file: Path) -> Iterator[EpisodeHost]:
    spec = UserCodeSpec(f"{file}:Room", {"limit": 2}, [f"{file}:{name}" for name in NAMES], 100)
    made = EpisodeHost(spec)
    yield made
    made.close()


@pytest.fixture
def make(file: Path, host: EpisodeHost) -> Iterator[MakeRunner]:
    runners = []

    def build(environment: bool = False, timeout_s: float = 20.0) -> EpisodeRunner:
        tools = load_tools([*(f"{file}:{name}" for name in NAMES), "calculator", "python"])
        options = RunnerOptions({tool.name: tool for tool in tools}, None, environment, host, timeout_s, 100)
        runners.append(EpisodeRunner(options, EXAMPLE))
        return runners[-1]

    yield build
    for runner in runners:
        runner.close()


def ask(runner: EpisodeRunner, name: str, **arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    step = runner.step(f"<tool_call>{call}</tool_call>")
    (message,) = step.messages
    known = name if name in runner._options.tools else ""
    assert message["role"] == "tool" and message["name"] == known and not step.done
    return str(message["content"])


def test_results_reach_the_model(make: MakeRunner) -> None:
    runner = make()
    assert ask(runner, "echo", text="a b\n'c'") == "a b\n'c'"
    assert ask(runner, "later", text="x") == '{"said": "x"}'
    assert ask(runner, "calculator", expression="(3 + 4) * 2.5") == "17.5"
    assert ask(runner, "python", code="print(sum(range(10)))") == "45"
    assert runner.record.tool_calls == 4 and runner.record.tool_errors == 0


def test_a_tool_with_a_state_has_one_in_each_episode(make: MakeRunner) -> None:
    first, second = make(), make()
    assert [ask(first, "Counter", step=2) for _ in range(3)] == ["2", "4", "6"]
    assert ask(second, "Counter", step=5) == "5"


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("fail", {}, "error: KeyError: 'lost', line 30 of my_tools.py"),
        ("leave", {}, "error: SystemExit: 3"),
        ("die", {}, "error: its process has ended"),
        ("nothing", {}, "error: there is no tool 'nothing'"),
        ("echo", {"txt": "a"}, "error: there is no argument 'txt'; the arguments are text"),
        ("echo", {}, "error: the argument 'text' is missing"),
        ("calculator", {"expression": "2 ** 9999999"}, "error: the result is too large"),
        ("calculator", {"expression": "__import__('os')"}, "error: \"__import__('os')\" is no arithmetic"),
        ("calculator", {"expression": "1 / 0"}, "error: division by zero"),
    ],
)
def test_a_failing_call_is_a_message_and_the_episode_goes_on(
    make: MakeRunner, name: str, arguments: dict[str, Any], message: str
) -> None:
    runner = make()
    assert ask(runner, name, **arguments).startswith(message)
    assert runner.record.tool_errors == 1
    assert ask(runner, "echo", text="still here") == "still here"
    assert runner.record.error is None


@pytest.mark.slow
def test_a_tool_that_hangs_is_ended_and_the_next_call_works(make: MakeRunner) -> None:
    runner = make(timeout_s=1.0)
    assert ask(runner, "hang") == "error: there was no answer within 1 s"
    assert (
        ask(runner, "python", code="while True: pass") == "error: the code took longer than 1 s and was ended"
    )
    assert ask(runner, "echo", text="again") == "again"


def test_what_no_tokenizer_takes_is_replaced(make: MakeRunner) -> None:
    assert ask(make(), "surrogate") == "a?b"


def test_a_long_result_is_cut_where_it_is_made(make: MakeRunner) -> None:
    content = ask(make(), "flood")
    assert content.startswith("x" * 100 + " ... (cut after 100") and len(content) < 200


def test_what_a_tool_has_started_ends_with_its_episode(make: MakeRunner, tmp_path: Path) -> None:
    runner = make()
    assert ask(runner, "fork", path=str(tmp_path / "numbers")) == "forked"
    numbers = [int(number) for number in (tmp_path / "numbers").read_text().split()]
    assert all(alive(number) for number in numbers)
    runner.close()
    wait_for_end(*numbers)


def test_what_the_module_of_a_tool_has_started_serves_all_episodes(make: MakeRunner, tmp_path: Path) -> None:
    first, second = make(), make()
    number = int(ask(first, "service"))
    ask(first, "fork", path=str(tmp_path / "numbers"))
    first.close()
    wait_for_end(*[int(pid) for pid in (tmp_path / "numbers").read_text().split()])
    assert ask(second, "service") == str(number) and alive(number)


def test_a_task_goes_on_in_the_next_call(make: MakeRunner) -> None:
    runner = make()
    assert ask(runner, "background", text="done") == "started"
    assert ask(runner, "background") == "done"


def test_everything_ends_with_the_host(file: Path, tmp_path: Path) -> None:
    host = EpisodeHost(UserCodeSpec(None, {}, [f"{file}:fork"]))
    tools = load_tools([f"{file}:fork"])
    options = RunnerOptions({tool.name: tool for tool in tools}, None, False, host, 20.0, 100)
    assert ask(EpisodeRunner(options, EXAMPLE), "fork", path=str(tmp_path / "numbers")) == "forked"
    host.close()
    wait_for_end(*[int(number) for number in (tmp_path / "numbers").read_text().split()])


def test_a_host_that_has_ended_stops_the_run(file: Path) -> None:
    host = EpisodeHost(UserCodeSpec(None, {}, [f"{file}:echo"]))
    tools = load_tools([f"{file}:echo"])
    options = RunnerOptions({tool.name: tool for tool in tools}, None, False, host, 20.0, 100)
    host._process.kill()
    host._process.wait()
    with pytest.raises(TrainingStopped, match="resume=auto"):
        ask(EpisodeRunner(options, EXAMPLE), "echo", text="x")
    host.close()


def test_malformed_calls_are_told_and_too_many_are_refused(make: MakeRunner) -> None:
    runner = make()
    step = runner.step('<tool_call>{"name": "echo", </tool_call>')
    assert step.messages[0]["content"].startswith("error: the call is not valid JSON")
    step = runner.step('<tool_call>{"name": "calculator", "arguments": {"expression": "1"}}</tool_call>' * 20)
    assert [message["content"] for message in step.messages[:16]] == ["1"] * 16
    assert all("at most 16" in message["content"] for message in step.messages[16:])


def test_calls_are_found_in_every_usual_form() -> None:
    text = (
        'Let me see. <tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call> <tool_call>{"name": "b"}'
    )
    assert [(call.name, call.arguments) for call in CallReader().read(text)] == [("a", {"x": 1}), ("b", {})]
    assert [call.name for call in CallReader().read('{"name": "a", "parameters": {"x": 1}}')] == ["a"]
    assert CallReader().read('{"answer": 4}') == CallReader().read("It is 4.") == []
    assert CallReader().read('<tool_call>{"name": "a", "arguments": 3}</tool_call>')[0].error is not None


@pytest.mark.parametrize("start", ["<think>", ""])
def test_a_call_within_thoughts_is_no_call(start: str) -> None:
    call = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'
    assert CallReader().read(f"{start}I could write {call}.</think> It is 12.") == []
    assert [call.name for call in CallReader().read(f"{start}Hm.</think>{call}<think>{call}")] == ["a"]
    assert [
        call.name for call in CallReader().read(f'{start}x</think> {{"name": "b", "arguments": {{}}}}')
    ] == ["b"]


def test_a_message_without_a_call_ends_an_episode_of_tools(make: MakeRunner) -> None:
    runner = make()
    assert runner.step("It is 4.").done and runner.record.messages_of_model == ["It is 4."]


def test_messages_of_the_environment_are_never_taken_for_the_model_s(make: MakeRunner) -> None:
    runner = make(environment=True)
    runner.step("as assistant")
    assert runner.record.messages[-1] == {"role": "assistant", "content": "an example"}
    assert runner.record.messages_of_model == ["as assistant"]
    text = pickle.loads(pickle.dumps(ResponseText("as assistant", record=runner.record)))
    assert text == "as assistant" and text.record == runner.record


# --- environments of the user --------------------------------------------------------------------------


def test_an_environment_of_the_user_with_tools(make: MakeRunner) -> None:
    runner = make(environment=True)
    step = runner.step("one")
    assert step.messages == [{"role": "user", "content": "1 of 2"}] and not step.done
    assert ask(runner, "echo", text="x") == "x"
    assert runner.step("two").done
    assert runner.record.reward == 1.0 and runner.record.turns == 3 and runner.record.error is None


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("nonsense", r"step returned 'what', not \(messages, reward, done\)"),
        ("none", "the model has nothing to answer"),
        ("infinite", "the reward of step is inf"),
        ("hang", "there was no answer within 1 s"),
    ],
)
def test_an_environment_that_fails_ends_its_episode_with_an_error(
    make: MakeRunner, message: str, error: str
) -> None:
    runner = make(environment=True, timeout_s=1.0)
    assert not runner.step("fine").done
    assert runner.step(message).done
    assert runner.record.error is not None
    assert re.search(error, runner.record.error)


def test_a_tool_that_dies_leaves_the_environment_its_state(make: MakeRunner) -> None:
    runner = make(environment=True)
    runner.step("one")
    assert ask(runner, "die") == "error: its process has ended"
    assert runner.step("two").messages == [{"role": "user", "content": "2 of 2"}]


@pytest.mark.parametrize(
    ("text", "name", "error"),
    [
        ("def f(x):\n    'Do.'\n    return x\n", "f", "missing a type hint in function f"),
        ("def f(x: str):\n    return x\n", "f", "it has no docstring"),
        ("def f(x: str):\n    'Do.'\n    return x\n", "f", "no description for the argument 'x'"),
        ("def f(x: int):\n    return x\n", "f", "has no docstring; annotate every parameter"),
        ("def f(x: 'Unknown'):\n    'Do.'\n", "f", "description cannot be made"),
        ("class T:\n    pass\n", "T", "objects cannot be called"),
        ("def f(:\n", "f", "SyntaxError"),
        ("x = 3\n", "x", "not a function or class"),
        ("x = 3\n", "f", "has no f"),
    ],
)
def test_a_tool_that_cannot_be_described_is_refused(tmp_path: Path, text: str, name: str, error: str) -> None:
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(ConfigError, match=error) as caught:
        load_tools([f"{tmp_path}/bad.py:{name}"])
    assert "env.tools" in str(caught.value)


def test_two_tools_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def calculator(x: str) -> str:\n    '''Do.\n\n    Args:\n        x: X.\n    '''\n"
    )
    with pytest.raises(ConfigError, match="two tools 'calculator'"):
        load_tools(["calculator", f"{tmp_path}/own.py:calculator"])


# --- the calculator and the games ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("7 // 2 - 7 % 2", "2"),
        ("2^10", "1024"),
        ("6 ÷ 4 × 2", "3"),
        ("-3 + +4", "1"),
        ("0.1 * 10", "1"),
    ],
)
def test_the_calculator_computes(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "a + 1",
        "True + 1",
        "[1]",
        "(-8) ** 0.5",
        "9" * 600,
        "2 ** 2 ** 40",
        "1e308 * 10",
        "'a' * 3",
        "1; 2",
    ],
)
def test_the_calculator_refuses(expression: str) -> None:
    with pytest.raises(ValueError):
        calculator(expression)


def test_guessing_by_halves_wins_and_held_out_ranges_are_not_trained_on() -> None:
    train, test = guess_problems("train"), guess_problems("test")
    assert not {row["question"] for row in train} & {row["question"] for row in test}
    for row in test:
        game = Guess()
        game.reset(Example("x", [], {"answer": row["answer"]}, row))
        low, high, total = row["low"], row["high"], 0.0
        for _ in range(3):
            guess = (low + high) // 2
            step = game.step(f"I say {guess}.")
            if step.done:
                break
            assert step.reward == 0.1
            total += step.reward
            low, high = (guess + 1, high) if step.messages[0]["content"] == "higher" else (low, guess - 1)
        # Neither quick nor slow play pays more, and the sum is a full score for the evaluation.
        assert step.done and total + step.reward == 1.0
    assert game.step("no idea").done


@pytest.mark.parametrize("size", [{}, {"numbers": 2, "largest": 9, "size": 100}])
def test_countdown_holds_out_numbers_in_any_order_with_a_target(size: dict[str, int]) -> None:
    def puzzles(split: str) -> set[tuple[tuple[int, ...], int]]:
        return {(tuple(sorted(row["numbers"])), row["target"]) for row in countdown_problems(split, **size)}

    assert len(puzzles("test")) > 10 and not puzzles("train") & puzzles("test")
    with pytest.raises(ValueError, match="too few problems"):
        countdown_problems("test", size=10, numbers=1, largest=1)


def test_countdown_takes_every_right_expression_and_says_what_is_wrong() -> None:
    for row in countdown_problems("train", size=30):
        game = Countdown()
        game.reset(Example("x", [], {}, row))
        right = game.step(f"Let me think.\n{row['answer']} = {row['target']}")
        assert right.done and right.reward == 1.0
        wrong = game.step(" + ".join(map(str, [*row["numbers"], 1])))
        assert not wrong.done and "exactly once" in wrong.messages[0]["content"]
        assert "not an expression" in game.step("I do not know").messages[0]["content"]
        assert (
            "not an expression" in game.step(f"{row['answer']} # {row['numbers'][0]}").messages[0]["content"]
        )
    game.reset(Example("x", [], {}, {"numbers": [3, 9, 9], "target": 1}))
    assert all(not game.step(expression).done for expression in ("9**9**3", "3.9*9", "9_9 + 3"))
