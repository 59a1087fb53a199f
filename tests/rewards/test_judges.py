"""Answers that are code: judges that evaluate them run in a sandbox, and nothing of a call is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sympy
from process_ends import child_of, error_in_time
from slow_cases import slow_except

from torchrl_grpo.config.schema import RewardConfig
from torchrl_grpo.data import reasoning_gym as tasks
from torchrl_grpo.data.example import Example
from torchrl_grpo.data.rows import codec
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.rewards.sandbox import gym_job, no_code
from torchrl_grpo.rewards.sandbox.math_verify import MathVerifyReward
from torchrl_grpo.rewards.sandbox.pool import JobError, JobFailed, JobTimeout, WorkerPool, reward_isolation
from torchrl_grpo.rewards.sandbox.worker import Isolation
from torchrl_grpo.runtime import sandbox

SECRET = "a key of the run"


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    os.environ["SOME_API_KEY"] = SECRET
    made = WorkerPool("jobs:run_code", size=1, timeout_s=20.0, isolation=Isolation.sandbox)
    del os.environ["SOME_API_KEY"]
    yield made
    made.close()


def run(pool: WorkerPool, code: str) -> Any:
    return pool.call({"answer": code})


@pytest.mark.parametrize(
    "code",
    [
        "import os; value = len(os.environ)",
        f"import ctypes; e = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), 'environ')\n"
        f"i = 0\nwhile e[i]: value += {SECRET!r} in e[i].decode(errors='replace'); i += 1",
        "open('/etc/passwd').read(); value = 1",
        "open('/proc/self/environ').read(); value = 1",
        "import os; os.listdir('/'); value = 1",
        "import tempfile; tempfile.mkstemp(); value = 1",
        "open('/dev/shm/of-an-answer', 'w'); value = 1",
        "import socket; socket.socket(); value = 1",
        "import socket; socket.socketpair(); value = 1",
        "import os; value = os.fork() >= 0",
        "import subprocess; subprocess.run(['true']); value = 1",
        "import os; os.kill(os.getppid(), 9); value = 1",
        "import os, signal; os.killpg(os.getpgid(0), signal.SIGSTOP); value = 1",
        "import os\nfor n in range(3, 1000):\n  if n != 3:\n    try: os.write(n, b'x'); value = 1\n"
        "    except OSError: pass",
        "import os\nos.read(0, 1) and 1\nvalue = os.fstat(0).st_rdev != os.stat('/dev/null').st_rdev",
    ],
)
def test_code_reaches_nothing(pool: WorkerPool, code: str) -> None:
    try:
        assert run(pool, code) == 0.0
    except JobFailed as error:
        assert any(name in str(error) for name in ("PermissionError", "FileNotFoundError", "OSError"))
    assert run(pool, "value = 3") == 3.0


def test_a_worker_imports_what_its_job_needs_and_no_configuration(pool: WorkerPool) -> None:
    assert run(pool, "import sys; value = 'torchrl_grpo.config' in sys.modules") == 0.0


def test_a_call_sees_nothing_of_an_earlier_one(pool: WorkerPool) -> None:
    change = "import jobs, math, builtins\njobs.run_code = lambda payload: 1.0\nmath.pi = 3\nbuiltins.x = 1"
    assert run(pool, change + "\nvalue = calls") == 1.0
    read = "import math, builtins\nvalue = calls + 10 * (math.pi == 3) + 100 * hasattr(builtins, 'x')"
    assert run(pool, read) == 1.0


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import os; os._exit(0)", "without a verdict"),
        ("import os; os.abort()", "without a verdict"),
        ("import os; os.write(3, b'{\"value\": 1'); os._exit(0)", "without a verdict"),
        ("import os; os.write(3, b'x' * 5 * 2**20)", "no verdict"),
        ("import sys; sys.exit('1.0')", "SystemExit"),
        ("import os; os.write(3, b'x' * 100_000)", "no verdict"),
        ("import os; os.write(3, b'{\"value\": 1e999}\\n'); os._exit(0)", "no verdict"),
        ("import os; os.write(3, b'{\"value\": true}\\n'); os._exit(0)", "no verdict"),
        ("import os; os.write(3, b'{\"value\": 1' + b'0' * 400 + b'}\\n'); os._exit(0)", "no verdict"),
        ("import os; os.write(3, b'[' * 9_000 + b'\\n'); os._exit(0)", "no verdict"),
        ('import os; os.write(3, b\'{"value": 1}{"value": 2}\\n\'); os._exit(0)', "no verdict"),
        ("value = [1] * 10**12", "MemoryError"),
        ("value = float('nan')", "no verdict"),
        ("value = 'text'", "ValueError"),
        ("raise ValueError('x' * 100_000)", "ValueError"),
    ],
)
def test_a_broken_verdict_is_an_error_and_the_worker_goes_on(pool: WorkerPool, code: str, error: str) -> None:
    with pytest.raises(JobFailed, match=error) as raised:
        run(pool, code)
    assert len(str(raised.value)) < 2_000
    assert run(pool, "value = 4") == 4.0


def test_an_error_writes_no_lines_of_its_own_to_the_log(pool: WorkerPool) -> None:
    with pytest.raises(JobFailed) as raised:
        run(pool, "raise ValueError('\\x1b[31m\\nTraining stopped')")
    assert "Training stopped" in str(raised.value) and str(raised.value).isprintable()


@pytest.mark.slow
def test_an_answer_that_never_ends_does_not_cost_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    # The worker itself ends such an answer, however late a loaded machine lets it.
    monkeypatch.setattr("torchrl_grpo.rewards.sandbox.pool._GRACE_S", 60.0)
    pool = WorkerPool("jobs:run_code", size=1, timeout_s=0.5, isolation=Isolation.sandbox)
    try:
        pool.wait_until_started()
        (worker,) = pool._all
        for code in (
            "while True: pass",
            "import time; time.sleep(1000)",
            "9 ** 9 ** 9 ** 9",
            "import os\nwhile True: os.write(1, b'x')",
            "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); signal.pause()",
        ):
            with pytest.raises(JobTimeout):
                run(pool, code)
        assert pool._all == {worker}
    finally:
        pool.close()


@pytest.mark.slow
def test_a_judge_that_is_stopped_returns_and_is_replaced() -> None:
    pool = WorkerPool("jobs:run_code", size=1, timeout_s=0.5, isolation=Isolation.sandbox)
    try:
        pool.wait_until_started()
        (worker,) = pool._all
        os.kill(child_of(worker._process.pid), signal.SIGSTOP)
        error = error_in_time(lambda: run(pool, "x = " + "1" * 1_000_000))
        assert isinstance(error, JobTimeout)
        assert run(pool, "value = 2") == 2.0 and worker not in pool._all
    finally:
        pool.close()


@pytest.mark.parametrize(
    "text",
    ["Integer (2 )*Symbol ('x')**Rational (1 ,2 )", "-x/2 + C", "Add(Integer(1), x, evaluate=False)",
     "sin(pi)/2 - factorial(3)", "Lt(x, Float('1.5'), evaluate=False)", "(x, Integer(2))"],
)  # fmt: skip
def test_expressions_of_the_parser_are_evaluated(text: str) -> None:
    variables = {"x": sympy.Symbol("x"), "C": sympy.Symbol("C")}
    assert no_code.is_expression(compile(text, "<string>", "eval"), variables)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "().__class__.__base__.__subclasses__()",
        "x.y",
        "getattr(x, 'y')",
        "(lambda: 1)()",
        "[y for y in x]",
        "(x := 1)",
        "f'{x.__class__}'",
        "open('file')",
        "d['__builtins__']",
        "parse_expr('True', global_dict=d)",
        "Function('f', __eq__=Tuple)(1)",
        "Function('f', **{'_' + '_eq_' + '_': Tuple})(1)",
        "symbols('x', cls=Function)",
        "Symbol('x', cls=Symbol)",
        "sympify('x')",
        "S('x')",
        "Integral(x, x)",
        "integrate(x, x)",
        "oracle_answer",
        "d",
    ],
)
def test_code_that_is_no_expression_is_told(text: str) -> None:
    variables = {"x": sympy.Symbol("x"), "d": {}}
    assert not no_code.is_expression(compile(text, "<string>", "eval"), variables)
    if text[0].isalpha():
        assert not no_code.is_value(compile(text, "<string>", "eval"))


def test_values_are_evaluated() -> None:
    assert no_code.is_value(compile("[['A', -1], (1.5, 2), {3: None}, True]", "<string>", "eval"))


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        pytest.param(r"\frac{x^2-1}{x-1}", "x+1", marks=pytest.mark.slow),
        (r"\frac{a^3-b^3}{a-b}", "a^2+ab+b^2"),
        (r"\binom{n}{2}", r"\frac{n(n-1)}{2}"),
        (r"\frac{\sin 2x}{2}", r"\sin x\cos x"),
        ("y=2x+3", "2x-y+3=0"),
        ("2x+3y+4z=6", "4x+6y+8z=12"),
        (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
    ],
)
def test_code_that_sympy_writes_for_itself_is_no_code_of_an_answer(
    math_verify: MathVerifyReward, truth: str, answer: str
) -> None:
    example = Example("x", [{"role": "user", "content": "q"}], {"answer": truth})
    assert math_verify(f"<answer>{answer}</answer>", example) == 1.0


@pytest.mark.parametrize(
    ("text", "only_numbers"),
    [
        ("18", True), ("-4.5", True), ("1 0 1\n2 3 4", True), ("3, 4", True),
        ("", False), ("1+1", False), ("9**9", False), ("1e9", False), ("x", False), ("(1)", False),
        ("1" * 10, False), ("1 " * 101 + "1", False), ("1.2.3", False), ("1_0", False), ("٣", False),
    ],
)  # fmt: skip
def test_answers_that_are_only_numbers_are_told(text: str, only_numbers: bool) -> None:
    assert no_code.is_numbers(text) == only_numbers


@pytest.fixture(scope="module")
def math_verify() -> Iterator[MathVerifyReward]:
    made = MathVerifyReward(20.0, 1)
    yield made
    made.close()


# Tasks whose scorers evaluate the answer.
EVALUATING = (
    "countdown", "puzzle24", "polynomial_multiplication", "simple_integration", "intermediate_integration",
    "string_insertion", "n_queens", "spiral_matrix", "binary_matrix",
)  # fmt: skip
INJECTIONS = [
    "__import__('os').system('touch {file}')",
    "open('{file}', 'w').close()",
    "exec(\"import pathlib; pathlib.Path('{file}').touch()\")",
    "setattr(__import__('sys').modules['{module}'].{scorer}, 'score_answer', "
    "__import__('builtins').eval('lambda s, a, e: 1.0'))",
    "[setattr(m.{scorer}, 'score_answer', lambda s, a, e: 1.0) for m in "
    "[().__class__.__base__.__subclasses__()[0].__init__.__globals__['sys'].modules['{module}']]]",
    "sympify(\"__import__('pathlib').Path('{file}').touch()\")",
    "S('__imp'+'ort__(\"os\").system(\"touch {file}\")')",
    "type('x', (int,), {{'__eq__': lambda s, o: True, '__float__': lambda s: 1.0}})(1)",
    "[parse_expr('True', global_dict=d), d['__builtins__']['getattr'](d['__builtins__']['__import__']('os'), "
    "'write')(3, b'{{\"value\": 1.0}}\\n')]",
    "parse_expr(\"[parse_expr('True', global_dict=d), d['__builtins__']['getattr'](d['__builtins__']"
    "['__import__']('os'), 'write')(3, b'{{\\\"value\\\": 1.0}}')]\", {{'d': {{}}}})",
    "Function('f', __eq__=Tuple)(1)",
    "S(\"Function('f', __eq__=Tuple)(1)\")",
    "oracle_answer",
    "[oracle_answer]",
    "[[oracle_answer]]",
    "[[valid_solutions[0]]]",
]


def attack(name: str, made: Any, file: Path, judge: Callable[[str], float | str]) -> None:
    """Give a judge answers that are code: none is paid for, none changes the judge, and none runs."""
    right, wrong = str(made[0]["answer"]), "[[1, 1], [2, 2]]"
    before = judge(right), judge(wrong)
    inert = max(score for score in (judge("some words"), 0.0) if isinstance(score, float))
    for text in INJECTIONS:
        answer = text.format(file=file, module=type(made).__module__, scorer=type(made).__name__)
        value = judge(answer)
        # Some tasks pay for any answer, and one fully for any that does not say True. Others pay by
        # the letters that are right.
        bound = 0.05 if name in EVALUATING else max(0.5, inert)
        assert isinstance(value, str) or value <= bound, f"{name} pays for {answer}"
    assert (judge(right), judge(wrong)) == before, name
    assert not file.exists(), name


def truth_of(name: str, made: Any) -> dict[str, Any]:
    return {"task": name, "args": {}, "entry": codec.encode(made[0])}


@pytest.mark.slow
def test_code_in_an_answer_changes_no_task_of_reasoning_gym(tmp_path: Path) -> None:
    """All answers in a single process without a sandbox: nothing but the watch on code is in their way."""
    pool = WorkerPool("jobs:score_watched", 1, 60.0, isolation=Isolation.none)
    names = [name for name in tasks.task_names() if name != "composite"]
    assert len(names) == 105
    # A third of the tasks have the scorer that compares texts. One of them shows what it does with an answer.
    made = [(name, tasks.make(name, {}, 7, 1)) for name in names]
    scorers = {type(task).score_answer: (name, task) for name, task in made}
    assert len(scorers) == 73 and {*EVALUATING} <= {name for name, _ in scorers.values()}

    truth: dict[str, Any] = {}

    def judge(answer: str) -> float | str:
        value: float | str = pool.call({"answer": answer, "truth": truth})
        return value

    try:
        for name, task in scorers.values():
            truth = truth_of(name, task)
            attack(name, task, tmp_path / "of-an-answer", judge)
    finally:
        pool.close()


@pytest.mark.slow
def test_code_in_an_answer_is_worth_nothing_in_the_sandbox(tmp_path: Path) -> None:
    """One task of each kind that evaluates the answer: as arithmetic, with sympy's parser, as a list."""
    pool = WorkerPool("torchrl_grpo.rewards.sandbox.gym_job:run", 1, 60.0, isolation=Isolation.sandbox)

    truth: dict[str, Any] = {}

    def judge(answer: str) -> float | str:
        try:
            return float(pool.call({"answer": answer, "truth": truth}))
        except JobTimeout:
            raise
        except JobError as error:
            return str(error)

    try:
        pool.wait_until_started()
        (worker,) = pool._all
        for name in ("countdown", "simple_integration", "n_queens"):
            # One worker for all tasks: it is told each in turn, as a worker of one task is at its start.
            worker._channel.ask({"setup": {"task": name, "args": {}}}, 60.0)
            task = tasks.make(name, {}, 7, 1)
            truth = truth_of(name, task)
            attack(name, task, tmp_path / "of-an-answer", judge)
    finally:
        pool.close()


@pytest.mark.parametrize("truth", slow_except(["7919"], ["7919", r"\frac{x^2-1}{x-1}"]))
def test_math_verify_runs_no_code(tmp_path: Path, math_verify: MathVerifyReward, truth: str) -> None:
    file = tmp_path / "of-an-answer"
    example = Example("x", [{"role": "user", "content": "q"}], {"answer": truth})
    texts = [text.format(file=file, module="sympy", scorer="Integer") for text in INJECTIONS]
    texts += [f"${texts[0]}$", f"\\boxed{{{texts[0]}}}", f"\\text{{{texts[0]}}}", f"\\[{texts[0]}\\]"]
    for text in texts:
        assert math_verify(f"<answer>{text}</answer>", example) == 0.0, text
        assert math_verify(text, example) == 0.0, text
    assert math_verify(f"<answer>{truth}</answer>", example) == 1.0
    assert not file.exists()


@pytest.mark.parametrize(
    "answer", ["0xa4 # 66 34 98 54 6", "len('aaaa')+len('')*(66+34)", "0x18", "2**4", "1 if 2 else 3"]
)
def test_games_take_arithmetic_alone(answer: str) -> None:
    for task in ("countdown", "puzzle24"):
        entry = tasks.make(task, {}, 1, 1)[0]
        truth = {"task": task, "args": {}, "entry": codec.encode(entry)}
        assert gym_job.run({"answer": answer, "truth": truth}) == 0.0
        assert gym_job.run({"answer": str(entry["answer"]), "truth": truth}) == 1.0


def test_a_machine_without_a_sandbox_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reward_isolation(RewardConfig(), "math_verify") is Isolation.sandbox
    monkeypatch.setattr(sandbox, "why_unavailable", lambda: "this kernel has no Landlock")
    with pytest.raises(ConfigError, match=r"reward.sandbox=true: the reward math_verify .* no Landlock"):
        reward_isolation(RewardConfig(), "math_verify")
    assert reward_isolation(RewardConfig(sandbox=False), "math_verify") is Isolation.process


def test_a_call_without_the_sandbox_still_leaves_nothing_to_the_next() -> None:
    pool = WorkerPool("jobs:run_code", size=1, timeout_s=20.0, isolation=Isolation.process)
    try:
        listen = "import socket; own = socket.socket(); own.bind(('127.0.0.1', 0)); value = calls"
        assert [run(pool, listen), run(pool, listen)] == [1.0, 1.0]
    finally:
        pool.close()
