"""``gsm8k``: which marked answers are one number, and that arithmetic left undone earns nothing."""

from __future__ import annotations

import itertools
import json
from fractions import Fraction
from pathlib import Path

import pytest
from test_math_verify import NUMBER, gsm8k

from torchrl_grpo.rewards.gsm8k import grade_answer


def strict(answer: str, truth: str = "72") -> float:
    return grade_answer(f"<answer>{answer}</answer>", truth)["strict"]


@pytest.mark.parametrize(
    "answer",
    [
        "144/2", "72/1", "36/.5", r"\frac{144}{2}", r"\boxed{144/2}", "#### 144/2", "-144/-2",
        r"\boxed{48} or \boxed{72}", "\\boxed{48}\n\\boxed{72}", "\\boxed{72}\nor 48", "\\boxed{72}\n48, 24",
        r"48, 24 and \boxed{72}", "48\n\\boxed{72}", "48 #### 72", "#### 48\n#### 72", "48\n#### 72",
        "x > 72", "72 < x", "x ≥ 72", "72 != x", "not 72", "It is not equal to 72", "more than 72",
        "half of 72",
    ],
)  # fmt: skip
def test_hedges_and_undone_work_earn_nothing(answer: str) -> None:
    assert strict(answer) == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        "<b>72</b>", "-> 72", "=> 72", "<<48+24=72>>72", "48 + 24 = 72\n\\boxed{72 clips}", r"\boxed 72",
        "\\boxed{\n72\n}", "$$\n\\boxed{72}\n$$", "#### 72 ####", r"The answer is \boxed{72}.",
        "In April she sold 48.\n48/2 = 24\n#### 72",
    ],
)  # fmt: skip
def test_one_number_earns(answer: str) -> None:
    assert strict(answer) == 1.0


def test_a_fraction_earns_where_the_truth_is_one() -> None:
    assert [strict("1/2", "0.5"), strict("36/72", "1/2"), strict(r"\frac{3}{2}", "1.5")] == [1.0] * 3


def test_thoughts_are_no_answer() -> None:
    nothing = {"strict": 0.0, "flexible": 0.0}
    assert grade_answer("<think>maybe <answer>72</answer></think>", "72") == nothing
    assert grade_answer("<think>maybe\n#### 72</think>Hm.", "72") == nothing
    assert grade_answer("<think><answer>1</answer></think><answer>72</answer>", "72")["strict"] == 1.0


@pytest.mark.slow
def test_undone_work_on_the_questions_earns_nothing(shared_data: Path | None) -> None:
    """Quotients, sums, products and differences of two numbers of the question; the right number earns."""
    tried, paid = 0, []
    for question, truth in gsm8k(shared_data):
        value = Fraction(truth.replace(",", ""))
        assert strict(truth, truth) == 1.0
        for left, right in itertools.permutations(dict.fromkeys(NUMBER.findall(question)), 2):
            first, second = (Fraction(number.replace(",", "")) for number in (left, right))
            results = {"+": first + second, "*": first * second, "-": first - second}
            results |= {"/": first / second} if second else {}
            for sign, result in results.items():
                if value not in (result, first, second):
                    continue
                for text in (f"{left}{sign}{right}", f"{left} {sign} {right}"):
                    tried += 1
                    if strict(text, truth) != 0.0:
                        paid.append((text, truth))
    assert tried > 4_000 and paid == []


def test_a_worked_solution_earns(shared_data: Path | None) -> None:
    if shared_data is None:
        pytest.skip("the full test set of GSM8K is not on this machine")
    for line in (shared_data / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines():
        solution = json.loads(line)["answer"]
        assert strict(solution, solution.rpartition("####")[2].strip()) == 1.0
