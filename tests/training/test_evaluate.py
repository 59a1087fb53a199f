"""Held-out evaluation: what it counts, its interval, pass@k, and that training does not notice it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from torchrl_grpo.config import Config
from torchrl_grpo.data.example import Example
from torchrl_grpo.data.identity import problem_names
from torchrl_grpo.envs import responses
from torchrl_grpo.envs.decoding import decode
from torchrl_grpo.errors import DataError
from torchrl_grpo.inference import Completion, Sampling
from torchrl_grpo.rewards.graders import CountingGrader, Graded, OwnRewardGrader
from torchrl_grpo.rewards.reward_set import RewardSet
from torchrl_grpo.rewards.types import ResponseScore
from torchrl_grpo.training.evaluator import Evaluation, Evaluator
from torchrl_grpo.training.held_out_loss import HeldOutLoss
from torchrl_grpo.training.session import Session


class Script:
    """Stands in for an engine: answers each prompt with the texts it was given for it."""

    def __init__(self, tokenizer: Any, answers: Sequence[Sequence[str]]) -> None:
        self.tokenizer, self.answers = tokenizer, answers
        self.calls: list[Any] = []

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        self.calls.append((prompts, sampling))
        texts = [group[: sampling.num_samples] for group in self.answers]
        ids = [
            [self.tokenizer(t)["input_ids"] + [self.tokenizer.eos_token_id] for t in group] for group in texts
        ]
        return [[Completion(i, [-1.0] * len(i), "stop") for i in group] for group in ids]


class FirstWord:
    """Right if the answer is the truth; a second metric, weighted by example, looks at the first letter."""

    primary = "exact"
    metrics = ("exact", "letter")

    def grade(self, completion: str, example: Example, score: ResponseScore) -> dict[str, float]:
        return {
            "exact": float(completion == example.truth["word"]),
            "letter": float(completion[:1] == example.truth["word"][:1]),
        }

    def weights(self, example: Example) -> dict[str, float]:
        return {"exact": 1.0, "letter": float(len(example.truth["word"]))}

    def close(self) -> None: ...


EXAMPLES = [
    Example(str(i), [{"role": "user", "content": f"Say {t}."}], {"word": t})
    for i, t in enumerate(["yes", "no", "maybe", "a"])
]


def make(tiny_model_dir: Path, answers: Sequence[Sequence[str]], k: int = 1, length: int = 200) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    cfg = Config(seed=3)
    cfg.inference_model.max_new_tokens, cfg.inference_model.max_model_len = 32, length
    cfg.eval.pass_at_k, cfg.eval.temperature = k, 0.6
    return Evaluator(EXAMPLES, tokenizer, CountingGrader(FirstWord()), cfg), Script(tokenizer, answers)


def test_accuracy_and_its_interval(tiny_model_dir: Path) -> None:
    evaluator, engine = make(tiny_model_dir, [["yes"], ["no"], ["more"], ["b"]])
    metrics = evaluator(engine).metrics
    assert metrics["eval/accuracy"] == metrics["eval/exact"] == 0.5
    # Weights 3, 2, 5, 1: all but the last begin with the right letter.
    assert metrics["eval/letter"] == pytest.approx(10 / 11)
    # Wilson's interval for 2 of 4.
    assert metrics["eval/accuracy_low"] == pytest.approx(0.1500, abs=1e-3)
    assert metrics["eval/accuracy_high"] == pytest.approx(0.8500, abs=1e-3)
    assert metrics["eval/num_problems"] == 4
    (prompts, sampling), *rest = engine.calls
    assert not rest and sampling == Sampling(1, 32, 0.0), "greedy, and nothing else unless asked for"
    assert (
        evaluator.tokenizer.decode(prompts[0])
        == "<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "eval/pass_at_1" not in metrics


def test_wordings_of_a_problem_count_as_fewer_and_are_named_in_the_rows(tiny_model_dir: Path) -> None:
    evaluator, engine = make(tiny_model_dir, [["yes"], ["no"], ["more"], ["b"]])
    alone = evaluator(engine)
    assert not any("problem" in row for row in alone.rows)
    same = ("x", "x", "y", "")
    evaluator.problems = problem_names(
        [replace(each, identity=key) for each, key in zip(EXAMPLES, same, strict=True)]
    )
    worded = evaluator(engine)
    assert [row.get("problem") for row in worded.rows] == [None, "0", None, None]
    assert worded.metrics["eval/accuracy"] == 0.5
    assert worded.metrics["eval/accuracy_low"] < alone.metrics["eval/accuracy_low"]
    assert worded.metrics["eval/accuracy_high"] > alone.metrics["eval/accuracy_high"]


def test_each_response_is_decoded_once(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator, engine = make(tiny_model_dir, [["yes"], ["no"], ["more"], ["b"]])
    decoded: list[str] = []

    def noting(tokenizer: Any, token_ids: Sequence[int]) -> str:
        decoded.append(decode(tokenizer, token_ids))
        return decoded[-1]

    monkeypatch.setattr(responses, "decode", noting)
    assert [row["response"] for row in evaluator(engine).rows] == decoded == ["yes", "no", "more", "b"]


def test_length_counts_the_end_token(tiny_model_dir: Path) -> None:
    evaluator, engine = make(tiny_model_dir, [[""], [""], [""], [""]])
    assert evaluator(engine).metrics["eval/response_length"] == 1


def test_pass_at_k_counts_problems_with_one_right_sample(tiny_model_dir: Path) -> None:
    answers = [["no", "yes"], ["yes", "yes"], ["maybe", "maybe"], ["b", "c"]]
    evaluator, engine = make(tiny_model_dir, answers, k=2)
    metrics = evaluator(engine).metrics
    assert metrics["eval/pass_at_2"] == 0.5
    assert metrics["eval/accuracy"] == 0.25
    sampling = engine.calls[1][1]
    assert (sampling.num_samples, sampling.temperature) == (2, 0.6)
    assert len(set(sampling.seeds)) == 4
    before = torch.get_rng_state()
    evaluator(engine)
    assert engine.calls[3][1].seeds == sampling.seeds, "the same draws at every evaluation"
    assert torch.equal(torch.get_rng_state(), before)


def test_a_problem_without_room_for_an_answer_is_named(tiny_model_dir: Path) -> None:
    with pytest.raises(DataError, match="max_model_len"):
        make(tiny_model_dir, [], length=40)


class Length:
    """A reward that gives any number, and fails at a text."""

    name = "length"

    def __call__(self, completion: str, example: Example) -> dict[str, float]:
        if completion == "bad":
            raise ValueError("no")
        return {"score": float(len(completion)), "short": float(len(completion) < 3)}


def judge(tiny_model_dir: Path, answers: Sequence[Sequence[str]], **keys: object) -> Any:
    """Evaluate with a reward of the user, and one that is weighted too."""
    evaluator, engine = make(tiny_model_dir, answers)
    exact: Any = type("Exact", (), {"name": "exact", "__call__": lambda self, c, e: c == e.truth["word"]})()
    rewards = RewardSet([(Length(), 2.0), (exact, 0.5)], group_size=len(answers[0]))
    evaluator.grader = CountingGrader(OwnRewardGrader("length", None), rewards, "length")
    for name, value in keys.items():
        setattr(evaluator, name, value)
    return evaluator(engine), engine


def test_a_reward_of_the_user_is_measured_and_all_its_responses_are_kept(tiny_model_dir: Path) -> None:
    result, _ = judge(tiny_model_dir, [["yes"], ["no"], ["bad"], ["a"]])
    metrics = result.metrics
    # 3, 2, 0 and 1; t of three degrees of freedom is 3.182.
    assert metrics["eval/primary"] == metrics["eval/reward/length"] == 1.5
    half = 3.182 * statistics.stdev([3, 2, 0, 1]) / 2
    assert metrics["eval/primary_low"] == pytest.approx(1.5 - half, rel=0.03)
    assert metrics["eval/primary_high"] == pytest.approx(1.5 + half, rel=0.03)
    assert metrics["eval/reward/exact"] == 0.75 and metrics["eval/reward"] == 2 * 1.5 + 0.5 * 0.75
    assert metrics["eval/reward/length/short"] == pytest.approx(2 / 3)
    assert metrics["eval/errors"] == 1 and "eval/accuracy" not in metrics
    assert result.rows[1] == {
        "id": "1",
        "prompt": "<|im_start|>user\nSay no.<|im_end|>\n<|im_start|>assistant\n",
        "response": "no",
        "rewards": {"length": 2.0, "length/short": 1.0, "exact": 1.0},
        "reward": 4.5,
        "grade": 2.0,
    }
    assert (
        result.rows[2]["errors"] == {"length": "ValueError: no"} and result.rows[2]["rewards"]["length"] == 0
    )


def test_pass_at_k_leaves_out_problems_that_a_judge_has_not_graded() -> None:
    of_problems: list[list[float | None]] = [[1.0, 0.0], [0.0, None], [1.0, None], [0.0, 0.0]]
    grades = [
        [Graded({} if value is None else {"primary": value}) for value in values] for values in of_problems
    ]
    evaluator: Any = SimpleNamespace(grader=SimpleNamespace(primary="primary"), pass_at_k=2)
    assert Evaluator._pass_at_k(evaluator, grades) == [1.0, 0.0]


def test_failures_to_grade_the_responses_of_pass_at_k_are_counted(tiny_model_dir: Path) -> None:
    result, _ = judge(tiny_model_dir, [["yes", "bad"], ["no", "no"], ["a", "a"], ["bad", "a"]], pass_at_k=2)
    # One greedy response, and one sample of each of two problems.
    assert result.metrics["eval/errors"] == 3


def test_a_reward_that_is_0_or_1_is_an_accuracy(tiny_model_dir: Path) -> None:
    metrics = judge(tiny_model_dir, [["a"], [""], [""], ["b"]])[0].metrics
    assert metrics["eval/accuracy"] == metrics["eval/primary"] == 0.5
    assert metrics["eval/accuracy_low"] == pytest.approx(0.1500, abs=1e-3)


def test_samples_take_the_place_of_the_greedy_response(tiny_model_dir: Path) -> None:
    answers = [["a", "bb"], ["", ""], ["no", "no"], ["a", "b"]]
    result, engine = judge(tiny_model_dir, answers, samples=2, pass_at_k=2)
    (call,) = engine.calls
    assert (call[1].num_samples, call[1].temperature) == (2, 0.6), "pass@k takes the same samples"
    assert result.metrics["eval/primary"] == (1.5 + 0 + 2 + 1) / 4
    assert result.metrics["eval/pass_at_2"] == 0.75
    assert [row["response"] for row in result.rows] == [text for group in answers for text in group]
    assert [row["grade"] for row in result.rows] == [1.0, 2.0, 0.0, 0.0, 2.0, 2.0, 1.0, 1.0]


def test_what_a_built_in_grader_says_is_kept_too(tiny_model_dir: Path) -> None:
    evaluator, engine = make(tiny_model_dir, [["yes"], ["not"], ["more"], ["b"]])
    row = evaluator(engine).rows[1]
    assert (row["rewards"], row["grade"]) == ({"exact": 0.0, "letter": 1.0}, 0.0)
    assert "reward" not in row and "errors" not in row


@pytest.mark.parametrize("is_loss", [False, True])
def test_the_engine_sleeps_only_while_the_trainer_grades(is_loss: bool) -> None:
    evaluation = Evaluation({"eval/num_problems": 1}, [], [])
    order: list[str] = []

    class Loss(HeldOutLoss):
        def __init__(self) -> None:
            pass

        def __call__(self, engine: object) -> Evaluation:
            order.append("grade")
            return evaluation

    def grade(engine: object) -> Evaluation:
        order.append("grade")
        return evaluation

    session: Any = object.__new__(Session)
    session._asleep = False
    session.parts = SimpleNamespace(
        plan=SimpleNamespace(sleeps=True),
        workers=SimpleNamespace(local_engine=SimpleNamespace(sleep=lambda: order.append("sleep"))),
        evaluator=Loss() if is_loss else grade,
        publisher=SimpleNamespace(verify_new_results=lambda: None),
    )
    session.counters = SimpleNamespace(take_grades=dict)
    session.outputs = SimpleNamespace(evaluations=None)
    session.evaluate()
    assert order == (["sleep", "grade"] if is_loss else ["grade"])
