"""Measures accuracy on the held-out problems: greedy, and pass@k on request.

An evaluation does not change the random states of training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from torchrl_grpo.config import Config
from torchrl_grpo.config.derived import has_episodes
from torchrl_grpo.data.episode import ResponseText
from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.chat import check_length, render
from torchrl_grpo.envs.responses import judged_texts
from torchrl_grpo.inference.protocol import Inference, Sampling
from torchrl_grpo.observe.stats import pass_at_k, wilson
from torchrl_grpo.rewards.graders import CountingGrader
from torchrl_grpo.runtime.rng import derive_seed


class Evaluator:
    """Grades an engine's responses to fixed problems.

    Args:
        examples: held-out problems.
        tokenizer: tokenizer that renders the problems and decodes the responses.
        grader: grader of the responses.
        cfg: configuration of the run.

    Raises:
        DataError: a problem's prompt leaves no room for a response.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        tokenizer: PreTrainedTokenizerBase,
        grader: CountingGrader,
        cfg: Config,
    ) -> None:
        self.examples = examples
        self.tokenizer = tokenizer
        self.grader = grader
        self.max_new_tokens = cfg.inference_model.max_new_tokens
        self.pass_at_k = cfg.eval.pass_at_k
        self.temperature = cfg.eval.temperature
        self.seed = cfg.seed
        self.episodes = has_episodes(cfg)
        self.prompts = [render(tokenizer, example)[1] for example in examples]
        # What is known of each problem after an evaluation.
        self.rows: list[dict[str, Any]] = []
        longest = cfg.inference_model.max_model_len - cfg.inference_model.max_new_tokens
        for example, prompt in zip(examples, self.prompts, strict=True):
            check_length(example, len(prompt), longest)

    def __call__(self, engine: Inference) -> dict[str, float]:
        """Evaluate the weights that ``engine`` holds.

        Returns:
            ``eval/accuracy`` (the grader's primary metric) with ``eval/accuracy_low`` and
            ``eval/accuracy_high`` (95 % Wilson interval), ``eval/<metric>`` for every metric,
            ``eval/num_problems``, ``eval/errors`` (number of responses whose grading raised an error; they
            count as wrong), ``eval/response_length`` (mean number of tokens), and ``eval/pass_at_<k>`` if
            ``eval.pass_at_k`` is greater than 1.
        """
        errors = self.grader.error_count
        greedy = self._answers(engine, Sampling(1, self.max_new_tokens, 0.0))
        grades = [
            self.grader.grade(texts[0], example)
            for texts, example in zip(greedy[0], self.examples, strict=True)
        ]
        self.rows = [
            {"id": example.id, "response": str(texts[0]), "grade": grade[self.grader.primary]}
            for example, texts, grade in zip(self.examples, greedy[0], grades, strict=True)
        ]
        weights = [self.grader.weights(example) for example in self.examples]
        metrics: dict[str, float] = {}
        for name in self.grader.metrics:
            total = sum(weight[name] for weight in weights)
            if total == 0:
                # A part of a mixture without held-out problems.
                continue
            right = sum(grade[name] * weight[name] for grade, weight in zip(grades, weights, strict=True))
            metrics[f"eval/{name}"] = right / total
            if name == self.grader.primary:
                low, high = wilson(right, round(total))
                metrics |= {
                    "eval/accuracy": right / total,
                    "eval/accuracy_low": low,
                    "eval/accuracy_high": high,
                }
        metrics["eval/num_problems"] = len(self.examples)
        metrics["eval/errors"] = self.grader.error_count - errors
        metrics["eval/response_length"] = greedy[1]
        if self.pass_at_k > 1:
            metrics[f"eval/pass_at_{self.pass_at_k}"] = self._pass_at_k(engine)
        return metrics

    def _pass_at_k(self, engine: Inference) -> float:
        seeds = [derive_seed(self.seed, "eval", example.id) for example in self.examples]
        sampled, _ = self._answers(
            engine, Sampling(self.pass_at_k, self.max_new_tokens, self.temperature, seeds)
        )
        scores = []
        for texts, example in zip(sampled, self.examples, strict=True):
            right = sum(self.grader.grade(text, example)[self.grader.primary] >= 1 for text in texts)
            scores.append(pass_at_k(len(texts), right, self.pass_at_k))
        return sum(scores) / len(scores)

    def _answers(self, engine: Inference, sampling: Sampling) -> tuple[list[list[ResponseText]], float]:
        """Return the texts for each problem, and their mean length in tokens."""
        if self.episodes:
            sampling = replace(sampling, problems=self.examples)
        completions = engine.generate(self.prompts, sampling)
        texts = [
            judged_texts(self.tokenizer, group, [prompt] * len(group))
            for prompt, group in zip(self.prompts, completions, strict=True)
        ]
        counts = [
            len(completion.token_ids) if completion.sampled is None else sum(completion.sampled)
            for group in completions
            for completion in group
        ]
        return texts, sum(counts) / len(counts)
