"""Rewards: what is extracted from a completion, what it is worth, and that nothing can hang or hide."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from grading import grades
from slow_cases import slow_except

from torchrl_grpo.config import Config
from torchrl_grpo.config.builtin import DATASETS
from torchrl_grpo.config.schema import EnvConfig, RewardConfig
from torchrl_grpo.config.values import AnswerFormat
from torchrl_grpo.data.example import Example
from torchrl_grpo.data.load import load
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.rewards import extract, numbers
from torchrl_grpo.rewards.format import FormatReward
from torchrl_grpo.rewards.gsm8k import Gsm8kReward, grade_answer
from torchrl_grpo.rewards.reasoning_gym import ReasoningGymReward
from torchrl_grpo.rewards.registry import (
    build_grader,
    build_reward_set,
    check_weights,
    eval_reward_name,
    unasked_tags,
)
from torchrl_grpo.rewards.reward_set import RewardSet
from torchrl_grpo.rewards.sandbox.math_verify import MathVerifyReward
from torchrl_grpo.rewards.sandbox.pool import JobError, JobFailed, JobTimeout, WorkerPool
from torchrl_grpo.rewards.text import BareNumberReward, ExactMatchReward
from torchrl_grpo.runtime import hardware

TESTS = Path(__file__).resolve().parents[1]
HANG = "jobs:hang"


@pytest.fixture(autouse=True)
def jobs_of_this_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TESTS / "helpers"))  # worker processes import what this one can


def example(answer: str = "72", **truth: Any) -> Example:
    return Example("test/1", [{"role": "user", "content": "Q"}], {"answer": answer, **truth})


# --- numbers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("72", 72),
        (" 72 ", 72),
        ("007", 7),
        ("72.0", 72),
        ("1,234", 1234),
        ("1,234,567.89", "123456789/100"),
        ("1,00,000", 100_000),
        ("1{,}234", 1234),
        (r"1\,234", 1234),
        ("$5.00", 5),
        ("$ 5", 5),
        (r"\$5", 5),
        ("$1,234.50", "2469/2"),
        ("£3", 3),
        ("5.", 5),
        (".5", "1/2"),
        ("0.50", "1/2"),
        ("-3", -3),
        ("−3", -3),
        ("- 3", -3),
        ("+3", 3),
        ("-$3", -3),
        ("$-3", -3),
        ("(-3)", -3),
        ("−1/2", "-1/2"),
        ("1/2", "1/2"),
        ("1 / 2", "1/2"),
        ("2 1/2", "5/2"),
        ("½", "1/2"),
        ("2½", "5/2"),
        ("50%", 50),
        (r"50\%", 50),
        ("72 apples", 72),
        ("72km", 72),
        ("5 m^2", 5),
        ("-3.5 degrees", "-7/2"),
        ("1.5e3", 1500),
        ("**72**", 72),
        ("The answer is 72.", 72),
        ("x = 72", 72),
        ("７２", 72),
        ("$72$", 72),
        (r"\(72\)", 72),
        (r"\boxed{72}", 72),
        (r"\frac{1}{2}", "1/2"),
        (r"\frac12", "1/2"),
        (r"-\dfrac{3}{4}", "-3/4"),
        (r"\frac{-3}{4}", "-3/4"),
        (r"2\frac{1}{2}", "5/2"),
        (r"72\text{ cm}", 72),
        # No number, or not one:
        ("", None),
        ("seventy-two", None),
        ("48 + 24 = 72", None),
        ("1 2 3 72", None),
        ("71, 72", None),
        ("1,23", None),
        ("1.2.3", None),
        ("3:00", None),
        ("12/25/2020", None),
        ("CO2", None),
        ("10^3", None),
        ("10-3", None),
        ("5/0", None),
        (r"\sqrt{2}", None),
        ("9" * 100, None),
        ("72" + " " * 300, None),
    ],
)
def test_only_number(text: str, value: Any) -> None:
    assert numbers.only(text) == (None if value is None else Fraction(value))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("48 + 24 = 72", 72),
        ("so 1, 2 and 3", 3),
        ("list 1,2,3", 3),
        ("10-3", 3),
        ("It costs $1,234.50.", "2469/2"),
        ("from 5 to -3", -3),
        ("72 (see CO2, 1.2.3, 3:00)", 72),
        (r"we get \frac{3}{4} of it", "3/4"),
        ("72" + " word" * 60_000, 72),
        ("no number", None),
    ],
)
def test_last_number(text: str, value: Any) -> None:
    assert numbers.last(text) == (None if value is None else Fraction(value))


def test_a_number_is_not_cut_where_the_search_starts() -> None:
    for pad in range(1_980, 2_003):  # the first window is the last 2,000 characters
        assert numbers.last("1,234,567" + "x" * pad) == 1_234_567


def test_same_compares_numbers_exactly_and_text_loosely() -> None:
    assert numbers.same("0.5", "1/2") and numbers.same("1,000", "1000.0") and numbers.same("A  b", "a B")
    assert not numbers.same("0.3333", "1/3") and not numbers.same("a", "b")


# --- tags and marks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<answer>72</answer>", "72"),
        ("a <answer> 72\n</answer> b", "72"),
        ("<ANSWER>72</Answer>", "72"),
        ("< answer >72</ answer >", "72"),
        ("<answer>1</answer> <answer>2</answer>", "2"),
        ("<answer><answer>72</answer></answer>", "72"),
        ("<answer>a <answer>b</answer> c</answer>", "a b c"),
        ("<answer><answer>72</answer>", "72"),
        ("<answer>72</answer></answer>", "72"),
        ("<answer>72</answer><answer>80", "72"),
        ("<answer></answer>", ""),
        ("<answer>72", None),
        ("72</answer>", None),
        ("</answer>72<answer>", None),
        ("<answers>72</answers>", None),
        ("", None),
    ],
)
def test_tagged(text: str, content: str | None) -> None:
    assert extract.tagged(text) == content


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("work\n#### 72", "72"),
        ("####72\nmore 80", "72"),
        ("#### 1\n#### 72", "72"),
        ("#### 72 ####", "72"),
        ("####\n72", "72"),
        ("####", None),
        ("### 72", None),
        ("", None),
    ],
)
def test_after_hashes(text: str, content: str | None) -> None:
    assert extract.after_hashes(text) == content


# --- gsm8k --------------------------------------------------------------------------------------------

BOTH, NONE, FLEXIBLE = (1.0, 1.0), (0.0, 0.0), (0.0, 1.0)


@pytest.mark.parametrize(
    ("completion", "truth", "expected"),
    [
        ("<think>48+24</think><answer>72</answer>", "72", BOTH),
        ("<answer>$72.00</answer>", "72", BOTH),
        ("<answer>72 clips</answer> and 5 more words", "72", BOTH),
        (r"<answer>\boxed{72}</answer>", "72", BOTH),
        ("<answer>48 + 24\n#### 72</answer>", "72", BOTH),
        ("48 + 24\n#### 72", "72", BOTH),
        ("#### 72 clips\nand 3", "72", BOTH),
        ("#### 5\n<answer>72</answer>", "72", BOTH),
        ("<answer>72</answer>\n#### 5", "72", BOTH),
        ("<answer>1</answer><answer>72</answer>", "72", BOTH),
        ("<answer>72</answer><answer>1</answer>", "72", NONE),
        ("<answer><answer>72</answer></answer>", "72", BOTH),
        ("<answer>1,234</answer>", "1234", BOTH),
        ("<answer>−3</answer>", "-3", BOTH),
        ("<answer>1/2</answer>", "0.50", BOTH),
        ("<answer>50%</answer>", "50", BOTH),
        ("<answer>73</answer> it is 72", "72", NONE),
        ("<answer>72", "72", FLEXIBLE),
        ("<answer>48 + 24 = 72</answer>", "72", FLEXIBLE),
        ("<answer>1 2 72</answer>", "72", FLEXIBLE),
        ("The answer is 72.", "72", FLEXIBLE),
        (r"It is \boxed{72}. Checked 3 times", "72", FLEXIBLE),
        (r"It is $\boxed{\frac{1}{2}}$", "0.5", FLEXIBLE),
        ("72 and then 73", "72", NONE),
        ("<answer></answer>", "72", NONE),
        ("", "72", NONE),
        ("no idea", "72", NONE),
        ("<answer>many</answer>", "many", BOTH),
        ("<answer>few</answer>", "many", NONE),
    ],
)
def test_gsm8k(completion: str, truth: str, expected: tuple[float, float]) -> None:
    parts = grade_answer(completion, truth)
    assert (parts["strict"], parts["flexible"]) == expected


def test_gsm8k_weighs_the_extraction_it_is_told_to() -> None:
    assert Gsm8kReward("strict")("It is 72", example()) == {"score": 0.0, "strict": 0.0, "flexible": 1.0}
    assert Gsm8kReward("flexible")("It is 72", example()) == {"score": 1.0, "strict": 0.0, "flexible": 1.0}


MEGABYTE = 1_000_000
GARBAGE = [
    "9", "1 ", "1.2.3 ", ",123", "1,", "-", "\\frac{", "\\frac 1", "1 1/2 ", "1/", "½", "\u0301\u0323",
    "<answer>", "<answer>1", "</answer>", "<", "< ",
    "\\boxed{", "#### ", "#", " ", "\n", "<think>", "$-", "\\text", "e1",
]  # fmt: skip


@pytest.mark.parametrize("piece", slow_except(["9", "<answer>1", "\\boxed{", "\n"], GARBAGE))
def test_a_megabyte_of_garbage_is_judged_in_linear_time(piece: str) -> None:
    garbage = piece * (MEGABYTE // len(piece))  # quadratic time would be hours
    before = grade_answer(garbage, "72")
    parts = FormatReward()(garbage, example())
    after_half = grade_answer(garbage + "\n<answer>72</answer>", "72")
    assert before == {"strict": 0.0, "flexible": 0.0}
    assert after_half == {"strict": 1.0, "flexible": 1.0}
    assert parts["exact"] == 0.0


def test_a_megabyte_inside_the_tags_is_no_answer() -> None:
    assert grade_answer(f"<answer>{'7' * MEGABYTE}</answer>", "7") == {"strict": 0.0, "flexible": 0.0}
    assert grade_answer(f"<answer>{'x' * MEGABYTE} 7</answer>", "7") == {"strict": 0.0, "flexible": 1.0}


# --- format, exact match, bare number -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        (" <think>a</think>\n<answer>b</answer>\n", 1.0),
        ("<think>a</think> so <answer>b</answer>", 0.5),
        ("<think>a</think><answer>b</answer> bye", 0.5),
        ("<think> </think><answer>b</answer>", 0.5),
        ("<think>a</think><answer></answer>", 0.5),
        ("<answer>b</answer><think>a</think>", 0.5),
        ("<think>a<answer>b</answer></think>", 0.5),
        ("<think>a</think><answer>b", 0.375),
        ("<answer>b</answer>", 0.25),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.25),
        ("<answer>" * 9, 0.0),
        ("", 0.0),
    ],
)
def test_format(completion: str, score: float) -> None:
    parts = FormatReward()(completion, example())
    assert parts["score"] == score
    assert parts["exact"] == float(score == 1.0)


@pytest.mark.parametrize(
    ("completion", "tags", "plain", "equation"),
    [
        ("<answer>New  York.</answer>", 1.0, 0.0, 0.0),
        ("new york", 0.0, 1.0, 0.0),
        ("  New York. ", 0.0, 1.0, 0.0),
        ("It is New York", 0.0, 0.0, 0.0),
        ("<think>Boston?</think>\n\nNew York", 0.0, 1.0, 0.0),
        ("<think>New York", 0.0, 0.0, 0.0),
        ("<thinking>a</thinking>New York", 0.0, 1.0, 0.0),
        ("[THINK]a[/THINK]\nNew York", 0.0, 1.0, 0.0),
        ("<seed:think>a</seed:think>New York", 0.0, 1.0, 0.0),
        ("<think>a<think>b</think>c</think>New York", 0.0, 1.0, 0.0),
        ("<think>The <think> tag</think>New York", 0.0, 1.0, 0.0),
        ("<think>a</think> <THINK >b</think>New York", 0.0, 1.0, 0.0),
        ("city = New York", 0.0, 0.0, 1.0),
        ("a = b =new york.\n", 0.0, 0.0, 1.0),
        ("New York =", 0.0, 0.0, 0.0),
        ("= New York = Boston", 0.0, 0.0, 0.0),
        ("", 0.0, 0.0, 0.0),
    ],
)
def test_exact_match(completion: str, tags: float, plain: float, equation: float) -> None:
    assert ExactMatchReward("equation")(completion, example("New York")) == equation
    assert ExactMatchReward("tags")(completion, example("New York")) == tags
    assert ExactMatchReward("plain")(completion, example("New York")) == plain


@pytest.mark.parametrize("truth", ["B", "(B)"])
@pytest.mark.parametrize(
    ("answer", "value"),
    [("B", 1.0), ("b.", 1.0), ("(B)", 1.0), ("B)", 1.0), ("B) 5 cm", 1.0), ("(B) a\t5", 1.0),
     ("(B) 5 cm, not (C)", 0.0), ("B) is wrong; the answer is C", 0.0), ("B: C", 0.0), ("B) 3\nC) 4", 0.0),
     ("C", 0.0), ("A) or B)", 0.0), ("B 5 cm", 0.0), ("Bees", 0.0), ("not B", 0.0), ("", 0.0)],
)  # fmt: skip
def test_exact_match_of_a_choice(answer: str, truth: str, value: float) -> None:
    assert ExactMatchReward("plain")(answer, example(truth)) == value


def test_letters_of_a_longer_truth_are_no_choice() -> None:
    assert ExactMatchReward("plain")("x) 5", example("x")) == 0.0
    assert ExactMatchReward("plain")("b", example("b) 5 cm")) == 0.0


@pytest.mark.parametrize(
    ("answer", "value"),
    [("5", 1.0), (" -5\n", 1.0), ("5.25", 1.0), ("+.5", 1.0), ("−5", 1.0), ("5.", 0.0), ("5 apples", 0.0),
     ("1,234", 0.0), ("1/2", 0.0), ("", 0.0), ("-", 0.0), ("5 6", 0.0)],
)  # fmt: skip
def test_bare_number(answer: str, value: float) -> None:
    assert BareNumberReward("plain")(answer, example()) == value
    assert BareNumberReward("tags")(f"x <answer>{answer}</answer>", example()) == value
    assert BareNumberReward("tags")(answer, example()) == 0.0


# --- workers ------------------------------------------------------------------------------------------


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool(HANG, size=1, timeout_s=2.0)
    yield made
    made.close()


def in_thread(job: Callable[[], Any]) -> Any:
    outcome: list[Any] = []
    thread = threading.Thread(target=lambda: outcome.append(job()))
    thread.start()
    thread.join(60)
    assert outcome, "the job is still running"
    return outcome[0]


def attempt(job: Callable[[], Any]) -> Any:
    try:
        return job()
    except JobError as error:
        return error


@pytest.mark.slow
@pytest.mark.parametrize("where", ["main thread", "worker thread"])
@pytest.mark.parametrize("answer", ["hang", "spin"])
def test_a_job_that_never_returns_is_ended_and_replaced(pool: WorkerPool, where: str, answer: str) -> None:
    run = in_thread if where == "worker thread" else lambda job: job()
    first = run(lambda: attempt(lambda: pool.call({"answer": "pid"})))
    assert isinstance(run(lambda: attempt(lambda: pool.call({"answer": answer}))), JobTimeout)
    second = run(lambda: attempt(lambda: pool.call({"answer": "pid"})))
    assert isinstance(second, float) and second != first
    assert run(lambda: pool.call({"answer": "pid"})) == second


@pytest.mark.slow
def test_a_worker_that_dies_or_raises_says_so_and_the_next_call_works(pool: WorkerPool) -> None:
    before = pool.call({"answer": "pid"})
    with pytest.raises(JobFailed, match="ZeroDivisionError: the job's own error"):
        pool.call({"answer": "raise"})
    assert pool.call({"answer": "pid"}) == before
    with pytest.raises(JobError, match="exit code 7"):
        pool.call({"answer": "die"})
    assert pool.call({"answer": "print"}) == 1.0


@pytest.mark.slow
def test_workers_share_the_calls_of_many_threads() -> None:
    pool = WorkerPool(HANG, size=2, timeout_s=20.0)
    try:
        pids: list[float] = []
        threads = [
            threading.Thread(target=lambda: pids.append(pool.call({"answer": "pid"}))) for _ in range(20)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(pids) == 20
        assert len(set(pids)) <= 2
    finally:
        pool.close()
        pool.close()
    with pytest.raises(JobError, match="closed"):
        pool.call({"answer": "pid"})


def test_more_workers_than_fit_in_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "available_gib", lambda: 4.0)
    with pytest.raises(ConfigError, match=r"reward.workers=100: .* need about 5 GiB, and 4.0 .*=40, or let"):
        WorkerPool(HANG, size=100, timeout_s=2.0)


@pytest.mark.slow
def test_a_setup_has_a_time_limit_of_its_own() -> None:
    """A large reward model loads longer than a worker may take to start."""
    pool = WorkerPool(HANG, size=1, timeout_s=5.0, setup="hang", setup_limit_s=0.1)
    with pytest.raises(JobError, match=r"did not answer within 0.1 s"):
        pool.wait_until_started()


@pytest.mark.slow
def test_a_job_that_cannot_be_imported_says_so() -> None:
    pool = WorkerPool("no_such_module:run", size=1, timeout_s=5.0)
    try:
        with pytest.raises(JobError, match="cannot start: ModuleNotFoundError"):
            pool.call({})
    finally:
        pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: MathVerifyReward(1.0, 1, job=HANG),
                                  lambda: ReasoningGymReward("plain", 1.0, 1, job=HANG)])  # fmt: skip
def test_a_hanging_comparison_is_a_counted_error_in_a_thread(make: Callable[[], Any]) -> None:
    reward = make()
    both = RewardSet([(reward, 2.0)], on_error=-1.0)
    try:
        [hung] = in_thread(lambda: both.score(["hang"], [example()]))
        [fine] = both.score(["ok"], [example()])
    finally:
        both.close()
    assert hung.total == -2.0 and "did not answer within" in hung.errors[reward.name]
    assert fine.total == 2.0 and not fine.errors
    assert both.error_count == 1


@pytest.fixture(scope="module")
def math_reward() -> Iterator[MathVerifyReward]:
    reward = MathVerifyReward(timeout_s=20.0, workers=1)
    yield reward
    reward.close()


DIAGONAL = r"\begin{pmatrix} -1 & 0 \\ 0 & -1 \end{pmatrix}"


@pytest.mark.parametrize(
    ("completion", "truth", "value"),
    [
        (r"<answer>\frac{1}{2}</answer>", "0.5", 1.0),
        ("<answer>0.5</answer>", r"\frac12", 1.0),
        (r"so $\boxed{x+1}$", "1+x", 1.0),
        (r"<answer>\sqrt{8}</answer>", r"2\sqrt{2}", 1.0),
        ("<answer>(1,2)</answer>", "(1,2)", 1.0),
        ("The answer is $3$.", "3", 1.0),
        ("<answer>4</answer>", "3", 0.0),
        ("3 <answer>4</answer>", "3", 0.0),
        ("no idea", "3", 0.0),
        ("", "3", 0.0),
        ("<answer></answer>", "3", 0.0),
        # Truths of MATH come out of their box without dollars.
        (rf"${DIAGONAL}$", DIAGONAL, 1.0),
        (rf"<answer>{DIAGONAL}</answer>", DIAGONAL, 1.0),
        (r"\begin{pmatrix}7&7\\7&-1\end{pmatrix}", DIAGONAL, 0.0),
        ("-1", DIAGONAL, 0.0),
        ("<answer>18.90</answer>", r"\$18.90", 1.0),
        ("<answer>18.91</answer>", r"\$18.90", 0.0),
    ],
)
def test_math_verify(math_reward: MathVerifyReward, completion: str, truth: str, value: float) -> None:
    assert math_reward(completion, example(truth)) == value
    assert in_thread(lambda: math_reward(completion, example(truth))) == value


def test_math_verify_with_an_unreadable_truth_is_an_error_and_not_a_zero(
    math_reward: MathVerifyReward,
) -> None:
    with pytest.raises(JobFailed, match="cannot parse the truth"):
        math_reward("3", example(" "))


# --- combination --------------------------------------------------------------------------------------


class Fixed:
    """A reward that returns, or raises, what it was made with."""

    def __init__(self, name: str, result: Any) -> None:
        self.name = name
        self._result = result

    def __call__(self, completion: str, example: Example) -> Any:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


def test_weights_sum_and_every_part_is_kept() -> None:
    both = RewardSet(
        [(Fixed("a", 0.5), 2.0), (Fixed("b", {"score": 1.0, "x": 0.25}), -0.5), (Fixed("c", 9), 0.0)]
    )
    [scored] = both.score(["text"], [example()])
    assert scored.total == pytest.approx(0.5)
    assert scored.parts == {"a": 0.5, "b": 1.0, "b/x": 0.25, "c": 9.0}
    assert scored.errors == {} and both.error_count == 0
    assert both.names == ("a", "b", "c")


def test_rewards_that_cancel_add_up_to_zero() -> None:
    assert 0.1 + 0.2 - 0.3 > 0

    def total(*values: float) -> float:
        rewards = [(Fixed(str(number), value), 1.0) for number, value in enumerate(values)]
        return RewardSet(rewards).score(["text"], [example()])[0].total

    assert total(0.1, 0.2, -0.3) == 0.0
    # What is smaller than rounding of another group's rewards is a reward all the same.
    assert total(1e-20, 0.0) == 1e-20 and total(1.0, -1.0 + 1e-12) == pytest.approx(1e-12, rel=1e-3)
    assert total(1e30, 1e30) == 2e30


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (RuntimeError("broken"), "RuntimeError: broken"),
        (math.nan, "not a finite number"),
        (math.inf, "not a finite number"),
        (-1e300, "score is -1e+300, not a finite number of a size up to 1e+30"),
        ({"score": 1.0, "x": 1e300}, "x is 1e+300, not a finite number"),
        ({"x": 1.0}, "needs a 'score'"),
        ("text", "could not convert"),
        (None, "returned None, not a number"),
    ],
)
def test_a_reward_that_fails_is_counted_logged_and_takes_on_error(
    result: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    both = RewardSet([(Fixed("bad", result), 2.0), (Fixed("good", 1.0), 1.0)], on_error=-0.5)
    with caplog.at_level(logging.WARNING):
        scored = both.score(["the completion"] * 2, [example()] * 2)
    assert [s.total for s in scored] == [0.0, 0.0]
    assert message in scored[0].errors["bad"] and set(scored[0].errors) == {"bad"}
    assert scored[0].parts == {"bad": -0.5, "good": 1.0}
    assert both.error_count == 2
    assert "the completion" in caplog.text and "test/1" in caplog.text


def test_threads_keep_the_order_and_count_every_error() -> None:
    class Echo:
        name = "echo"

        def __call__(self, completion: str, example: Example) -> float:
            return float(completion)

    both = RewardSet([(Echo(), 1.0)], workers=4)
    scored = both.score([str(n) if n % 10 else "x" for n in range(100)], [example()] * 100)
    both.close()
    assert [s.total for s in scored] == [float(n) if n % 10 else 0.0 for n in range(100)]
    assert both.error_count == 10


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="2 completions but 1 examples"):
        RewardSet([(Fixed("a", 1.0), 1.0)]).score(["a", "b"], [example()])


# --- by configuration ---------------------------------------------------------------------------------


def config(dataset: str = "gsm8k", weights: dict[str, float] | None = None, **env: Any) -> Config:
    return Config(env=EnvConfig(dataset=dataset, **env), reward=RewardConfig(weights=weights or {}))


def test_every_dataset_has_default_weights_that_pass_the_check() -> None:
    for name, dataset in DATASETS.items():
        assert check_weights(config(name)) == dataset.weights
        assert dataset.weights[dataset.eval_reward] == max(dataset.weights.values())


def test_the_defaults_of_gsm8k() -> None:
    built = build_reward_set(config())
    [scored] = built.score(["<think>a</think><answer>72</answer>"], [example()])
    assert scored.total == pytest.approx(1.1)
    assert scored.parts == {
        "gsm8k": 1.0, "gsm8k/strict": 1.0, "gsm8k/flexible": 1.0,
        "format": 1.0, "format/tags": 1.0, "format/exact": 1.0,
    }  # fmt: skip
    [loose] = built.score(["It is 72"], [example()])
    assert (loose.total, loose.parts["gsm8k/flexible"]) == (0.0, 1.0)
    [plain] = build_reward_set(config(answer_format="plain")).score(["It is 72"], [example()])
    assert plain.parts["gsm8k"] == 1.0


@pytest.mark.parametrize(
    ("dataset", "weights", "words"),
    [
        ("gsm8k", {"gsm9k": 1.0}, ["reward.weights.gsm9k", "gsm8k, format, math_verify", "bare_number"]),
        ("gsm8k", {"gsm8k": math.nan}, ["reward.weights.gsm8k=nan", "finite"]),
        ("gsm8k", {"gsm8k": 0.0}, ["every weight is 0"]),
        ("gsm8k", {"ifeval": 1.0}, ["reward.weights.ifeval", "env.dataset=gsm8k"]),
        ("ifeval", {"exact_match": 1.0}, ["reward.weights.exact_match", "env.dataset=ifeval"]),
    ],
)
def test_bad_weights(dataset: str, weights: dict[str, float], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build_reward_set(config(dataset, weights))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.slow
def test_reasoning_gym_is_scored_by_the_task_itself() -> None:
    args = {"min_terms": 2, "max_terms": 2}
    cfg = config(
        "reasoning_gym", {"reasoning_gym": 1.0, "bare_number": 0.1}, task="chain_sum", task_args=args
    )
    cfg.env.answer_format = AnswerFormat("plain")
    cfg.reward.timeout_s = 20.0
    cfg.eval.num_problems = 3
    problem = load(cfg).train[0]
    answer = problem.truth["entry"]["answer"]
    built = build_reward_set(cfg)
    grader = build_grader(cfg, built)
    try:
        right, wrong, wordy = built.score([f" {answer}\n", "999999", "hmm"], [problem] * 3)
        assert (right.total, wrong.total, wordy.total) == pytest.approx((1.1, 0.1, 0.0))
        assert not right.errors
        assert grades(grader, answer, problem) == {"accuracy": 1.0}
        assert grades(grader, "999999", problem) == {"accuracy": 0.0}
        assert (grader.primary, grader.metrics, grader.error_count) == ("accuracy", ("accuracy",), 0)
    finally:
        grader.close()
        assert built.score([answer], [problem])[0].total == pytest.approx(1.1)  # still open
        built.close()


def test_reasoning_gym_reads_the_answer_out_of_the_tags() -> None:
    tagged = ReasoningGymReward("tags", 5.0, 1, job=HANG)
    try:
        assert tagged("so <answer> pid </answer>", example()) > 1.0
        assert tagged("pid", example()) == 0.0
        with pytest.raises(JobFailed):
            tagged("<answer>raise</answer>", example())
    finally:
        tagged.close()


def test_importing_the_rewards_loads_nothing_heavy() -> None:
    heavy = ("torch", "sympy", "numpy", "nltk", "datasets", "reasoning_gym", "math_verify", "langdetect")
    code = f"import sys, torchrl_grpo.rewards; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=TESTS.parent
    )
    assert done.stdout.strip() == "[]"


# --- graders ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "env", "weights", "warns"),
    [
        ("What is 3?", {}, {}, True),
        ("What is 3? Write <answer>NUMBER</answer>.", {}, {}, False),
        ("What is 3?", {"answer_format": AnswerFormat.plain}, {}, False),
        # math_verify also reads what no tags surround.
        ("What is 3?", {}, {"math_verify": 1.0}, False),
        ("What is 3?", {}, {"math_verify": 1.0, "format": 0.1}, True),
    ],
)
def test_tags_that_no_prompt_asks_for_are_spoken_of(
    content: str, env: dict[str, Any], weights: dict[str, float], warns: bool
) -> None:
    cfg = config("jsonl", weights)
    for name, value in env.items():
        setattr(cfg.env, name, value)
    example = Example("jsonl/train/1", [{"role": "user", "content": content}], {"answer": "3"})
    warning = unasked_tags(cfg, example)
    assert (warning is not None) is warns
    if warning is not None:
        assert "jsonl/train/1" in warning and "write env.answer_format=plain" in warning


def test_graders_say_what_they_measure() -> None:
    gsm8k, jsonl = build_grader(config()), build_grader(config("jsonl"))
    assert (gsm8k.primary, gsm8k.metrics) == ("flexible", ("strict", "flexible"))
    assert grades(gsm8k, "It is 72", example()) == {"strict": 0.0, "flexible": 1.0}
    assert gsm8k.weights(example()) == {"strict": 1.0, "flexible": 1.0}
    assert grades(jsonl, "<answer>72</answer>", example()) == {"accuracy": 1.0}
    assert grades(jsonl, "72", example()) == {"accuracy": 0.0}
    ifeval = build_grader(config("ifeval"))
    assert ifeval.primary == "prompt_strict"
    assert set(ifeval.metrics) == {"prompt_strict", "prompt_loose", "instruction_strict", "instruction_loose"}


@pytest.mark.parametrize(
    ("dataset", "weights", "name"),
    [
        ("gsm8k", {}, "gsm8k"),
        ("math", {}, "math_verify"),
        ("jsonl", {}, "exact_match"),
        ("jsonl", {"format": 1.0}, "exact_match"),
        ("jsonl", {"math_verify": 1.0, "format": 1.0}, "math_verify"),
        ("jsonl", {"gsm8k": 0.5, "math_verify": 1.0}, "math_verify"),
        ("jsonl", {"math_verify": 1.0, "exact_match": 1.0}, "exact_match"),
        ("jsonl", {"math_verify": 1.0, "exact_match": 0.0}, "math_verify"),
        ("math", {"gsm8k": 1.0}, "gsm8k"),
        ("gsm8k", {"math_verify": 1.0}, "math_verify"),
        ("reasoning_gym", {"closeness": 3.0}, "reasoning_gym"),
        ("ifeval", {"format": 1.0}, "ifeval"),
    ],
)
def test_evaluation_is_judged_as_training_is(dataset: str, weights: dict[str, float], name: str) -> None:
    assert eval_reward_name(config(dataset, weights)) == name


@pytest.mark.slow
def test_the_same_rows_are_graded_the_same_whatever_reads_them() -> None:
    cfg = config("jsonl", {"math_verify": 1.0, "format": 1.0})
    cfg.reward.timeout_s = 20.0
    built = build_reward_set(cfg)
    grader = build_grader(cfg, built)
    try:
        problem = example(r"\frac{1}{2}")
        for completion in ("<think>.</think><answer>0.5</answer>", r"It is $\frac{2}{4}$.", "It is 3."):
            [scored] = built.score([completion], [problem])
            assert grades(grader, completion, problem) == {"accuracy": scored.parts["math_verify"]}
    finally:
        grader.close()
        built.close()


def test_an_error_in_grading_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    grader = build_grader(config())
    broken = Example("broken/1", [{"role": "user", "content": "Q"}], {})
    assert grades(grader, "the completion", broken) == {"strict": 0.0, "flexible": 0.0}
    assert grader.error_count == 1
    assert "broken/1" in caplog.text and "the completion" in caplog.text
    grader.close()
    grader.close()
