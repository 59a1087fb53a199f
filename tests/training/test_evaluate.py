"""Held-out evaluation: what it counts, its interval, pass@k, and that training does not notice it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from torchrl_grpo.config import Config
from torchrl_grpo.data.example import Example
from torchrl_grpo.errors import DataError
from torchrl_grpo.inference import Completion, Sampling
from torchrl_grpo.training.evaluator import Evaluator


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
    error_count = 0

    def grade(self, completion: str, example: Example) -> dict[str, float]:
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
    grader: Any = FirstWord()
    return Evaluator(EXAMPLES, tokenizer, grader, cfg), Script(tokenizer, answers)


def test_accuracy_and_its_interval(tiny_model_dir: Path) -> None:
    evaluator, engine = make(tiny_model_dir, [["yes"], ["no"], ["more"], ["b"]])
    metrics = evaluator(engine)
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


def test_length_counts_the_end_token(tiny_model_dir: Path) -> None:
    evaluator, engine = make(tiny_model_dir, [[""], [""], [""], [""]])
    assert evaluator(engine)["eval/response_length"] == 1


def test_pass_at_k_counts_problems_with_one_right_sample(tiny_model_dir: Path) -> None:
    answers = [["no", "yes"], ["yes", "yes"], ["maybe", "maybe"], ["b", "c"]]
    evaluator, engine = make(tiny_model_dir, answers, k=2)
    metrics = evaluator(engine)
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
