"""Rewards of the user by file or import path: signatures, arguments, state, limits, and mistakes."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchrl_grpo.config import Config
from torchrl_grpo.config.checks import validate
from torchrl_grpo.config.values import Dataset
from torchrl_grpo.data import Example, load
from torchrl_grpo.errors import ConfigError, UserError
from torchrl_grpo.rewards import build_grader, build_reward_set, check_weights
from torchrl_grpo.rewards import cli as rewards_cli
from torchrl_grpo.rewards.types import ResponseScore

EXAMPLES = [
    Example("a", [{"role": "user", "content": "One?"}], {"answer": "1"}, {"level": 3, "answer": "1"}),
    Example("b", [{"role": "user", "content": "Two?"}], {"answer": "2"}, {"level": 5, "answer": "2"}),
]

FILE = """
    import asyncio, os, time
    from pathlib import Path
    from beside import double

    def length(completion, example):
        return len(completion) + len(example.id)

    def parts(completion, example):
        return {"score": 0.5, "level": example.columns["level"]}

    def scaled(completion, example, factor):
        return factor * double(len(completion))

    def listed(prompts, completions, answer, **columns):
        print("this goes to the log")
        rows = zip(prompts, completions, answer, columns["level"])
        return [float(p == "One?") + 2 * (c == a) + n for p, c, a, n in rows]

    def ranks(completions):
        return [sorted(completions, key=len).index(one) for one in completions]

    async def later(completion, example):
        await asyncio.sleep(0.01)
        return 1.0

    async def together(completions, **columns):
        return await asyncio.gather(*(later(one, None) for one in completions))

    class Count:
        def __init__(self, start=0):
            self.calls = start
        def __call__(self, completion, example):
            self.calls += 1
            return self.calls

    def hangs(completion, example):
        while completion == "hang":
            pass
        return 1.0

    def dies(completion, example):
        os._exit(3)

    def raises(completion, example):
        raise KeyError("no such thing")

    def text(completion, example):
        return "good"

    def too_few(completions, **columns):
        return [1.0]

    def no_list(completions, **columns):
        return 1.0

    def numpy_number(completion, example):
        import numpy
        return numpy.float32(0.25)

    def wrong_names(answer):
        return 1.0

    NUMBER = 3

    class Silent:
        pass
"""


@pytest.fixture
def scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[ResponseScore]]:
    """Scores of ``completions`` under one function of the file, as a run would compute them."""
    (tmp_path / "mine.py").write_text(textwrap.dedent(FILE))
    (tmp_path / "beside.py").write_text("def double(number):\n    return 2 * number\n")
    monkeypatch.chdir(tmp_path)

    def score(function: str, completions: list[str], **arguments: Any) -> list[ResponseScore]:
        cfg = config(function, arguments)
        rewards = build_reward_set(cfg)
        try:
            return rewards.score(completions, EXAMPLES[: len(completions)])
        finally:
            rewards.close()

    return score


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").touch()


def config(function: str, arguments: dict[str, Any] | None = None, place: str = "mine.py") -> Config:
    cfg = Config()
    cfg.env.dataset, cfg.env.data_path = Dataset("jsonl"), "rows.jsonl"
    cfg.reward.functions = {"own": f"{place}:{function}"}
    cfg.reward.args = {"own": arguments} if arguments else {}
    cfg.reward.timeout_s = 2.0
    return cfg


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        ("length", {}, [4.0, 3.0]),
        ("scaled", {"factor": 0.5}, [3.0, 2.0]),
        ("listed", {}, [1 + 0 + 3, 0 + 0 + 5]),
        ("ranks", {}, [1.0, 0.0]),
        ("later", {}, [1.0, 1.0]),
        ("together", {}, [1.0, 1.0]),
        ("Count", {}, [1.0, 2.0]),
        ("Count", {"start": 10}, [11.0, 12.0]),
        ("numpy_number", {}, [0.25, 0.25]),
    ],
)
def test_a_function_of_the_user_scores(
    scored: Callable[..., list[ResponseScore]],
    function: str,
    arguments: dict[str, Any],
    expected: list[float],
) -> None:
    scores = scored(function, ["abc", "de"], **arguments)
    assert [one.errors for one in scores] == [{}, {}]
    assert [one.total for one in scores] == expected
    assert [one.parts["own"] for one in scores] == expected


def test_parts_of_a_function_are_logged(scored: Callable[..., list[ResponseScore]]) -> None:
    assert [one.parts for one in scored("parts", ["", ""])] == [
        {"own": 0.5, "own/level": 3.0},
        {"own": 0.5, "own/level": 5.0},
    ]


@pytest.mark.parametrize(
    ("function", "error"),
    [
        ("hangs", "did not answer within 2 s"),
        ("dies", "exited unexpectedly (exit code 3)"),
        ("raises", "KeyError: 'no such thing'"),
        ("text", "TypeError: it returned 'good', not a number"),
        ("too_few", "ValueError: it returned 1 numbers for 2 completions"),
        ("no_list", "TypeError: it returned float, not a list of 2 numbers"),
    ],
)
def test_what_goes_wrong_in_a_function_counts_as_an_error(
    scored: Callable[..., list[ResponseScore]], function: str, error: str
) -> None:
    first, second = scored(function, ["hang", "well"])
    assert first.total == 0.0 and error in first.errors["own"]
    # A call that was ended does not end the next one.
    assert (second.total, second.errors) == ((1.0, {}) if function == "hangs" else (0.0, first.errors))


def test_weights_and_the_grader_name_functions_too(
    scored: Callable[..., list[ResponseScore]], tmp_path: Path
) -> None:
    cfg = config("length")
    assert check_weights(cfg) == {"own": 1.0}, "the data set's own rewards would teach something else"
    cfg.reward.weights = {"own": 0.5, "exact_match": 2.0}
    cfg.eval.reward = "own"
    rewards = build_reward_set(cfg)
    grader = build_grader(cfg, rewards)
    try:
        assert rewards.score(["1"], EXAMPLES[:1])[0].total == 0.5 * 2
        assert grader.grade("1", EXAMPLES[0]) == {"accuracy": 1.0}
        assert grader.error_count == 0
    finally:
        grader.close()
        rewards.close()


def test_examples_have_the_columns_of_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": str(n), "answer": n, "level": n % 3} for n in range(4)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = config("length")
    cfg.eval.num_problems = 1
    problems = load(cfg)
    found = [one.columns for one in [*problems.train, *problems.held_out]]
    assert sorted(found, key=str) == sorted(rows, key=str)


@pytest.mark.parametrize(
    ("spec", "arguments", "message"),
    [
        ("absent.py:length", {}, "there is no file "),
        ("mine.py:longth", {}, "mine.py has no longth; it has length, parts, scaled"),
        ("mine.py:NUMBER", {}, "NUMBER is int, not a function or class"),
        ("mine.py:wrong_names", {}, "a reward cannot have the signature (answer)"),
        ("mine.py:scaled", {}, "a reward cannot have the signature (completion, example, factor)"),
        (
            "mine.py:length",
            {"target": 3},
            "reward.args.own={'target': 3}: length(completion, example) cannot",
        ),
        ("mine.py:Count", {"begin": 3}, "reward.args.own={'begin': 3}: Count(start=0) cannot"),
        ("mine.py:Silent", {}, "objects of this class cannot be called"),
        ("broken.py:length", {}, "SyntaxError: "),
        ("needs.py:length", {}, "ModuleNotFoundError: No module named 'nowhere', line 2 of needs.py"),
        ("no.such.module:length", {}, "there is no module no; install it, or name a file"),
        ("failing:length", {}, "importing failing failed: RuntimeError: not today, line 1 of failing.py"),
    ],
)
def test_a_function_that_cannot_be_used_is_one_clear_message(
    scored: Callable[..., list[ResponseScore]],
    tmp_path: Path,
    spec: str,
    arguments: dict[str, Any],
    message: str,
) -> None:
    (tmp_path / "broken.py").write_text("def length(:\n")
    (tmp_path / "needs.py").write_text("\nimport nowhere\n")
    (tmp_path / "failing.py").write_text("raise RuntimeError('not today')\n")
    cfg = config("", arguments)
    cfg.reward.functions = {"own": spec}
    with pytest.raises(ConfigError) as told:
        check_weights(cfg)
    assert message in str(told.value)
    assert str(told.value).startswith(("reward.functions.own", "reward.args.own"))


@pytest.mark.parametrize(
    ("functions", "args", "grader", "message"),
    [
        ({"own": "mine.py"}, {}, None, "reward.functions.own=mine.py"),
        ({"own": ":length"}, {}, None, "reward.functions.own=:length"),
        ({"own": "mine.py:two words"}, {}, None, "names no function"),
        ({"gsm8k": "mine.py:length"}, {}, None, "a built-in reward has this name"),
        ({"a/b": "mine.py:length"}, {}, None, "a reward's name has letters, digits, _ and -"),
        ({}, {"own": {"x": 1}}, None, "reward.functions has no function of this name"),
        ({"own": "mine.py:length"}, {"own": 3}, None, "the arguments of a function have names"),
        ({"own": "mine.py:length"}, {}, "other", "eval.reward=other"),
    ],
)
@pytest.mark.usefixtures("rows")
def test_keys_that_do_not_fit_are_told_before_anything_is_loaded(
    functions: dict[str, str], args: dict[str, Any], grader: str | None, message: str
) -> None:
    cfg = config("length")
    cfg.reward.functions, cfg.reward.args, cfg.eval.reward = functions, args, grader
    with pytest.raises(UserError) as told:
        validate(cfg)
    assert message in str(told.value)


@pytest.mark.usefixtures("rows")
def test_a_weight_for_no_function_lists_the_user_s_too() -> None:
    cfg = config("length")
    cfg.reward.weights = {"owm": 1.0}
    with pytest.raises(UserError, match=r"reward.weights.owm=1.0.*exact_match, own"):
        validate(cfg)


def test_the_command_scores_with_a_function(
    scored: Callable[..., list[ResponseScore]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"completion": "abc", "question": "One?", "answer": "1", "level": 3}
    (tmp_path / "done.jsonl").write_text(json.dumps(row) + "\n")
    words = ["--dataset", "jsonl", "done.jsonl", "--function", "own=mine.py:scaled"]
    assert rewards_cli.main([*words, "--function-args", '{"own": {"factor": 0.5}}']) == 0
    assert json.loads(capsys.readouterr().out) == {"total": 3.0, "parts": {"own": 3.0}, "errors": {}}
    assert rewards_cli.main(["--dataset", "jsonl", "done.jsonl", "--function", "own=mine.py:nothing"]) == 2
    assert "reward.functions.own='mine.py:nothing'" in capsys.readouterr().err
