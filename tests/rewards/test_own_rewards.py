"""Rewards of the user by file or import path: signatures, arguments, state, limits, and mistakes."""

from __future__ import annotations

import contextlib
import json
import os
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from grading import grades

from torchrl_grpo.config import Config
from torchrl_grpo.config.checks import validate
from torchrl_grpo.data.example import Example
from torchrl_grpo.data.load import load
from torchrl_grpo.errors import ConfigError, UserError
from torchrl_grpo.rewards import cli as rewards_cli
from torchrl_grpo.rewards.registry import (
    build_grader,
    build_reward_set,
    check_weights,
    eval_reward_name,
    grader_name,
    joined_rewards,
)
from torchrl_grpo.rewards.types import ResponseScore

EXAMPLES = [
    Example("a", [{"role": "user", "content": "One?"}], {"answer": "1"}, {"level": 3, "answer": "1"}),
    Example("b", [{"role": "user", "content": "Two?"}], {"answer": "2"}, {"level": 5, "answer": "2"}),
]

FILE = """
    import asyncio, functools, os, time
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

    def too_many(completions, **columns):
        return [1.0] * (len(completions) + 1)

    def no_list(completions, **columns):
        return 1.0

    def numpy_number(completion, example):
        import numpy
        return numpy.float32(0.25)

    def leveled(completions, level, **columns):
        return [float(level)] * len(completions)

    def needs(completions, solution, level):
        return [0.0] * len(completions)

    def swapped(prompts, responses):
        return 0.0

    def some_numbers(completions, **columns):
        return [None if one == "hang" else 1.0 for one in completions]

    def not_finite(completion, example):
        return float("inf") if completion == "inf" else float("nan")

    def reads(completion, example):
        try:
            return float(len(input()))
        except EOFError:
            return 7.0

    def starts_another(completion, example):
        import subprocess, sys
        started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path("started.txt").write_text(str(started.pid))
        time.sleep(600)

    class Created:
        def __init__(self):
            with open("created.txt", "a") as file:
                file.write(f"{os.getpid()}\\n")
        def __call__(self, completion, example):
            return 1.0

    class NeedsGpu:
        def __init__(self):
            raise RuntimeError(f"no GPU in {os.environ['CUDA_VISIBLE_DEVICES']!r}")
        def __call__(self, completion, example):
            return 1.0

    fixed = functools.partial(scaled, factor=1.0)

    def wrong_names(answer):
        return 1.0

    NUMBER = 3

    class Silent:
        pass

    def joined(prompts, completions):
        return [len(set(prompts))] * len(prompts)

    joined.prompts_per_call = 2

    def alone(completion, example):
        return 1.0

    alone.prompts_per_call = 2

    class Stateful:
        prompts_per_call = 2
        def __call__(self, completions):
            return [1.0] * len(completions)

    def uncounted(completions):
        return [1.0] * len(completions)

    uncounted.prompts_per_call = True
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
    cfg.env.dataset, cfg.env.data_path = "jsonl", "rows.jsonl"
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
        ("ranks", {}, [0.0, 0.0]),
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
    assert [score.errors for score in scores] == [{}, {}]
    assert [score.total for score in scores] == expected
    assert [score.parts["own"] for score in scores] == expected


def test_parts_of_a_function_are_logged(scored: Callable[..., list[ResponseScore]]) -> None:
    assert [score.parts for score in scored("parts", ["", ""])] == [
        {"own": 0.5, "own/level": 3.0},
        {"own": 0.5, "own/level": 5.0},
    ]


@pytest.mark.parametrize(
    ("function", "error"),
    [
        pytest.param("hangs", "did not answer within 2 s", marks=pytest.mark.slow),
        ("dies", "exited unexpectedly (exit code 3)"),
        ("raises", "KeyError: 'no such thing', line 46 of mine.py"),
        ("text", "TypeError: it returned the text 'good', not a number"),
        ("too_many", "ValueError: for 1 completions, it returned a list of length 2"),
        ("no_list", "TypeError: it returned float, not a list of 1 numbers"),
        ("not_finite", "ValueError: score is nan, not a finite number"),
        pytest.param(
            "starts_another",
            "reward.functions.own=mine.py:starts_another did not answer within 2 s",
            marks=pytest.mark.slow,
        ),
        ("some_numbers", "it returned None, not a number"),
    ],
)
def test_what_goes_wrong_in_a_function_counts_as_an_error(
    scored: Callable[..., list[ResponseScore]], function: str, error: str
) -> None:
    first, second = scored(function, ["hang", "well"])
    assert first.total == 0.0 and error in first.errors["own"]
    assert "Job" not in first.errors["own"] and "UserCodeError" not in first.errors["own"]
    # A call that was ended does not end the next one.
    passes = function in ("hangs", "some_numbers")
    assert (second.total, second.errors) == ((1.0, {}) if passes else (0.0, first.errors))


@pytest.mark.slow
def test_processes_that_a_function_started_end_with_it(
    scored: Callable[..., list[ResponseScore]], tmp_path: Path
) -> None:
    (score,) = scored("starts_another", [""])
    assert "did not answer" in score.errors["own"]
    child = int((tmp_path / "started.txt").read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        # A machine's first process may take its time to notice, or never do so in a container.
        with contextlib.suppress(psutil.TimeoutExpired):
            psutil.Process(child).wait(timeout=5)
        assert psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_function_reads_nothing_and_prints_to_the_log(
    scored: Callable[..., list[ResponseScore]], capfd: pytest.CaptureFixture[str]
) -> None:
    assert [score.total for score in scored("reads", ["", ""])] == [7.0, 7.0]
    scored("listed", ["", ""])
    assert capfd.readouterr().err.count("this goes to the log") == 2, "once for each group"


def test_comparisons_are_those_of_one_prompt(scored: Callable[..., list[ResponseScore]]) -> None:
    cfg = config("ranks")
    rewards = build_reward_set(cfg)
    try:
        examples = [EXAMPLES[0]] * 3 + [EXAMPLES[1]] * 2
        scores = rewards.score(["aaa", "a", "aa", "b", "bb"], examples)
    finally:
        rewards.close()
    assert [score.total for score in scores] == [2.0, 0.0, 1.0, 0.0, 1.0]


def test_a_function_that_says_so_gets_several_prompts(scored: Callable[..., list[ResponseScore]]) -> None:
    rewards = build_reward_set(config("joined"))
    try:
        assert rewards.groups_per_call == 2
        third = replace(EXAMPLES[0], id="c")
        scores = rewards.score([""] * 6, [*[EXAMPLES[0]] * 2, *[EXAMPLES[1]] * 2, *[third] * 2])
    finally:
        rewards.close()
    assert [score.total for score in scores] == [2.0, 2.0, 2.0, 2.0, 1.0, 1.0]


def test_comparisons_stay_within_a_group_if_two_groups_have_one_problem(
    scored: Callable[..., list[ResponseScore]],
) -> None:
    rewards = build_reward_set(config("ranks"), group_size=2)
    try:
        scores = rewards.score(["aaaa", "a", "aa", "aaa"], [EXAMPLES[0]] * 4)
    finally:
        rewards.close()
    assert [score.total for score in scores] == [1.0, 0.0, 0.0, 1.0]


def test_an_argument_is_not_replaced_by_a_column(scored: Callable[..., list[ResponseScore]]) -> None:
    assert [score.total for score in scored("leveled", ["", ""], level=9)] == [9.0, 9.0]


def test_a_class_is_created_in_its_own_processes_alone(
    scored: Callable[..., list[ResponseScore]], tmp_path: Path
) -> None:
    scored("Created", [""])
    (pid,) = (tmp_path / "created.txt").read_text().split()
    assert int(pid) != os.getpid()


@pytest.mark.usefixtures("scored")
def test_what_cannot_be_created_ends_the_run_before_it_starts() -> None:
    with pytest.raises(
        ConfigError, match=r"RuntimeError: no GPU in '', line \d+ of mine.py; it runs in a process"
    ):
        build_reward_set(config("NeedsGpu"))


@pytest.mark.usefixtures("scored")
def test_columns_that_a_function_needs_are_checked_against_the_data() -> None:
    with pytest.raises(
        ConfigError, match=r"needs solution, which is no column of a \(columns: level, answer\)"
    ):
        build_reward_set(config("needs"), {"": EXAMPLES[0]})
    build_reward_set(config("needs", {"solution": "1"}), {"": EXAMPLES[0]}).close()


@pytest.mark.slow
@pytest.mark.usefixtures("scored")
def test_the_grader_has_a_state_of_its_own_and_refuses_what_is_not_finite() -> None:
    for function, completion, expected, errors in (
        ("Count", "", 1.0, 0),
        ("length", "four", 5.0, 0),
        ("not_finite", "inf", 0.0, 1),
        ("not_finite", "nan", 0.0, 1),
    ):
        cfg = config(function)
        cfg.eval.reward = "own"
        rewards = build_reward_set(cfg)
        grader = build_grader(cfg, rewards)
        try:
            assert grades(grader, completion, EXAMPLES[0]) == {"primary": expected}
            assert grader.error_count == errors
            if function == "Count":
                assert rewards.score([""], EXAMPLES[:1])[0].total == 1.0, "the first call of training"
        finally:
            grader.close()
            rewards.close()


@pytest.mark.slow
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
        (graded,) = grader.grade(["1"], EXAMPLES[:1])
        assert graded.metrics == {"primary": 2.0} and graded.score.total == 0.5 * 2
        assert graded.score.parts == {"own": 2.0, "exact_match": 0.0}
        assert grader.error_count == 0
    finally:
        grader.close()
        rewards.close()


@pytest.mark.parametrize(
    ("weights", "grader", "counted", "note"),
    [
        ({}, None, {"own": 1.0}, None),
        ({}, "own", {"own": 1.0}, None),
        ({"own": 2.0}, None, {"own": 2.0}, None),
        ({"format": 0.5}, None, {"format": 0.5, "own": 1.0}, "reward.weights={format:0.5,own:1.0} says"),
        ({"format": 0.5, "own": 0.0}, None, {"format": 0.5, "own": 0.0}, "{format:0.5,own:0.0} says"),
        ({"format": 0.0}, None, {"format": 0.0, "own": 1.0}, "{format:0.0,own:1.0} says"),
        ({"format": 0.5}, "own", {"format": 0.5}, None),
        ({"format": 0.5, "own": 1.0}, "own", {"format": 0.5, "own": 1.0}, "{format:0.5,own:1.0} says"),
    ],
)
@pytest.mark.usefixtures("scored")
def test_a_function_without_a_weight_counts_with_1_unless_it_only_grades(
    weights: dict[str, float], grader: str | None, counted: dict[str, float], note: str | None
) -> None:
    cfg = config("length")
    cfg.reward.weights, cfg.eval.reward = weights, grader
    Path("rows.jsonl").touch()
    validate(cfg)
    assert check_weights(cfg) == counted and list(check_weights(cfg)) == list(counted)
    warning = joined_rewards(cfg)
    assert warning is None if note is None else note in str(warning)


@pytest.mark.parametrize(
    ("weights", "chosen", "grades"),
    [
        ({}, None, "own"),
        ({"own": 0.1, "format": 1.0}, None, "own"),
        ({"own": -1.0, "format": 1.0}, None, "own"),
        ({"own": 0.1, "exact_match": 1.0}, None, "exact_match"),
        ({"own": 1.0, "exact_match": 1.0}, None, "exact_match"),
        ({"own": 2.0, "exact_match": 1.0}, None, "own"),
        ({"own": 0.0, "format": 1.0}, None, "exact_match"),
        ({}, "exact_match", "exact_match"),
    ],
)
@pytest.mark.usefixtures("rows")
def test_the_heaviest_reward_grades(weights: dict[str, float], chosen: str | None, grades: str) -> None:
    cfg = config("length")
    cfg.reward.weights, cfg.eval.reward = weights, chosen
    assert eval_reward_name(cfg) == grader_name(cfg) == grades


@pytest.mark.slow
@pytest.mark.usefixtures("scored")
def test_a_threshold_says_what_is_right() -> None:
    cfg = config("length")
    cfg.eval.threshold = 3.0
    rewards = build_reward_set(cfg)
    grader = build_grader(cfg, rewards)
    try:
        assert grades(grader, "a", EXAMPLES[0]) == {"accuracy": 0.0}
        assert grades(grader, "ab", EXAMPLES[0]) == {"accuracy": 1.0}
    finally:
        grader.close()
        rewards.close()
    gsm8k = Config()
    gsm8k.eval.threshold = 0.5
    with pytest.raises(ConfigError, match=r"eval.threshold=0.5: the reward gsm8k grades.*threshold=null"):
        build_grader(gsm8k)


@pytest.mark.usefixtures("scored")
def test_a_failed_reward_is_never_right() -> None:
    cfg = config("raises")
    cfg.eval.threshold, cfg.reward.on_error = 0.0, 2.0
    grader = build_grader(cfg)
    try:
        (graded,) = grader.grade(["a"], EXAMPLES[:1])
        assert graded.metrics == {"accuracy": 0.0} and "no such thing" in graded.errors["own"]
    finally:
        grader.close()


@pytest.mark.slow
@pytest.mark.usefixtures("scored")
def test_rewards_that_held_out_problems_lack_a_column_for_are_left_out_of_the_evaluation() -> None:
    cfg = config("length")
    cfg.reward.functions = {"own": "mine.py:length", "needs": "mine.py:needs"}
    cfg.reward.weights = {"own": 2.0, "needs": 1.0, "closeness": 1.0}
    bare = Example("held", [{"role": "user", "content": "One?"}], {}, {"level": 3})
    grader = build_grader(cfg, None, {"": bare})
    try:
        (graded,) = grader.grade(["a"], [bare])
        assert graded.score.parts == {"own": 5.0} and graded.score.total == 10.0
        assert [note.split(". ")[0] for note in grader.notes] == [
            f"warning: held-out responses are not scored by {name}" for name in ("needs", "closeness")
        ]
        assert "needs solution, which is no column of held" in grader.notes[0]
    finally:
        grader.close()
    cfg.eval.reward = "needs"
    with pytest.raises(ConfigError, match="needs solution, which is no column of held"):
        build_grader(cfg, None, {"": bare})


def test_examples_have_the_columns_of_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": str(n), "answer": n, "level": n % 3} for n in range(4)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = config("length")
    cfg.eval.num_problems = 1
    problems = load(cfg)
    columns = [example.columns for example in [*problems.train, *problems.held_out]]
    assert sorted(columns, key=str) == sorted(rows, key=str)


@pytest.mark.parametrize(
    ("spec", "arguments", "message"),
    [
        ("absent.py:length", {}, "there is no file "),
        ("mine.py:longth", {}, "mine.py has no longth; write length after"),
        ("mine.py:NUMBER", {}, "NUMBER is int, not a function or class"),
        ("mine.py:wrong_names", {}, "a reward cannot have the signature (answer)"),
        ("mine.py:scaled", {}, "a reward cannot have the signature (completion, example, factor)"),
        (
            "mine.py:length",
            {"target": 3},
            "reward.args.own={'target': 3}: length(completion, example) cannot",
        ),
        ("mine.py:Count", {"begin": 3}, "reward.args.own={'begin': 3}: Count(start=0) cannot"),
        ("mine.py:swapped", {}, "a reward cannot have the signature (prompts, responses)"),
        (
            "mine.py:fixed",
            {"size": 3},
            "(completion, example, *, factor=1.0) cannot be given these arguments",
        ),
        ("leaving:length", {}, "importing leaving failed: SystemExit: 5, line 1 of leaving.py"),
        ("mine.py:Silent", {}, "objects of this class cannot be called"),
        ("mine.py:alone", {}, "prompts_per_call=2 must be a number from 1 on, of a function f(prompts"),
        ("mine.py:Stateful", {}, "prompts_per_call=2 must be a number from 1 on, of a function f(prompts"),
        (
            "mine.py:uncounted",
            {},
            "prompts_per_call=True must be a number from 1 on",
        ),
        ("broken.py:length", {}, "line 2 of broken.py; correct the file"),
        ("parsing.py:length", {}, "(char 0), line 2 of parsing.py; correct the file"),
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
    (tmp_path / "broken.py").write_text("\ndef length(:\n")
    (tmp_path / "parsing.py").write_text("import json\njson.loads('')\n")
    (tmp_path / "needs.py").write_text("\nimport nowhere\n")
    (tmp_path / "leaving.py").write_text("raise SystemExit(5)\n")
    (tmp_path / "failing.py").write_text("raise RuntimeError('not today')\n")
    cfg = config("", arguments)
    cfg.reward.functions = {"own": spec}
    with pytest.raises(ConfigError) as raised:
        check_weights(cfg)
    assert message in str(raised.value)
    assert str(raised.value).startswith(("reward.functions.own", "reward.args.own"))


@pytest.mark.parametrize(
    ("functions", "args", "grader", "message"),
    [
        ({"own": "mine.py"}, {}, None, "reward.functions.own=mine.py"),
        ({"own": ":length"}, {}, None, "reward.functions.own=:length"),
        ({"own": "mine.py:two words"}, {}, None, "names no function"),
        ({"gsm8k": "mine.py:length"}, {}, None, "a built-in reward has this name"),
        ({"mean": "mine.py:length"}, {}, None, "the metric reward/mean is of all rewards"),
        ({"shape": "mine.py:length"}, {}, None, "TorchRL's specs have an attribute of this name"),
        ({"a/b": "mine.py:length"}, {}, None, "a reward's name has letters, digits, _ and -"),
        ({}, {"own": {"x": 1}}, None, "reward.functions has no function of this name"),
        ({"own": "mine.py:length"}, {"own": 3}, None, "the arguments of a function have names"),
        ({"own": "mine.py:length"}, {}, "other", "eval.reward=other"),
        ({"own": "mine.py:length"}, {}, "ifeval", "cannot judge env.dataset=jsonl"),
    ],
)
@pytest.mark.usefixtures("rows")
def test_keys_that_do_not_fit_are_told_before_anything_is_loaded(
    functions: dict[str, str], args: dict[str, Any], grader: str | None, message: str
) -> None:
    cfg = config("length")
    cfg.reward.functions, cfg.reward.args, cfg.eval.reward = functions, args, grader
    with pytest.raises(UserError) as raised:
        validate(cfg)
    assert message in str(raised.value)


@pytest.mark.usefixtures("rows")
def test_a_weight_for_no_function_lists_the_user_s_too() -> None:
    cfg = config("length")
    cfg.reward.weights = {"owm": 1.0}
    with pytest.raises(UserError, match=r"reward.weights.owm=1.0.*exact_match, environment, own"):
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
