"""Measures accuracy or rewards on the held-out problems: greedy or sampled, and pass@k on request.

An evaluation does not change the random states of training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from torchrl_grpo.config import Config
from torchrl_grpo.config.derived import has_episodes
from torchrl_grpo.data.example import Example
from torchrl_grpo.data.identity import problem_names
from torchrl_grpo.data.pictures import by_name
from torchrl_grpo.envs.chat import check_length, prompt_pictures, render
from torchrl_grpo.envs.responses import judged_texts, written_texts
from torchrl_grpo.inference.protocol import Completion, Inference, PromptPictures, Sampling
from torchrl_grpo.observe.stats import effective_share, mean_interval, pass_at_k, wilson
from torchrl_grpo.rewards.graders import ANY_NUMBER, CountingGrader, Graded
from torchrl_grpo.runtime.rng import derive_seed


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        metrics: metrics by name.
        rows: what ``evaluations.jsonl`` says of each response, without the step.
        pictures: pictures of each problem by the names of their files; empty for a model of text.
    """

    metrics: dict[str, float]
    rows: list[dict[str, Any]]
    pictures: list[dict[str, bytes]] = field(default_factory=list)


class Evaluator:
    """Grades an engine's responses to fixed problems.

    Args:
        examples: held-out problems.
        tokenizer: tokenizer that renders the problems and decodes the responses.
        grader: grader of the responses. Its ``metrics`` are names, and ``primary`` is the name of the one
            that counts, which is ``ANY_NUMBER`` for a reward that may give any number. ``weights(example)``
            is how much an example counts in the mean of each metric, and 0 where it does not.
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
        self.problems = problem_names(examples)
        self.tokenizer = tokenizer
        self.grader = grader
        self.max_new_tokens = cfg.inference_model.max_new_tokens
        self.samples = cfg.eval.samples
        self.pass_at_k = cfg.eval.pass_at_k
        self.temperature = cfg.eval.temperature
        self.seed = cfg.seed
        self.episodes = has_episodes(cfg)
        rendered = [render(tokenizer, example) for example in examples]
        self.texts = [text for text, _ in rendered]
        self.prompts = [tokens for _, tokens in rendered]
        self.pictures = [
            prompt_pictures(tokenizer, example, prompt)
            for example, prompt in zip(examples, self.prompts, strict=True)
        ]
        self.what = f"the reward {grader.name}" if grader.primary == ANY_NUMBER else "accuracy"
        longest = cfg.inference_model.max_model_len - cfg.inference_model.max_new_tokens
        for example, prompt in zip(examples, self.prompts, strict=True):
            check_length(example, len(prompt), longest)

    def __call__(self, engine: Inference) -> Evaluation:
        """Evaluate the weights that ``engine`` holds.

        Returns:
            The responses, and the metrics: ``eval/<metric>`` for every metric of the grader. If its primary
            one says what is right, it is also ``eval/accuracy`` with ``eval/accuracy_low`` and
            ``eval/accuracy_high`` (95 % Wilson interval). If it is a reward that may give any number, it is
            ``eval/primary`` with an interval of its mean, and the accuracy is there if all values are 0 or 1.
            With rewards of the user, ``eval/reward`` is their sum and ``eval/reward/<name>`` each.
            ``eval/num_problems``, ``eval/errors`` (number of responses whose grading raised an error, those
            of pass@k too), ``eval/response_length`` (mean number of tokens), and ``eval/pass_at_<k>`` if
            ``eval.pass_at_k`` is greater than 1, unless judges have failed.
        """
        errors = self.grader.error_count
        completions = self._answers(engine, self.samples)
        texts = self._written(completions)
        grades = sampled = self._grade(completions, texts)
        if self.pass_at_k > (self.samples or 1):
            answers = self._answers(engine, self.pass_at_k)
            sampled = self._grade(answers, self._written(answers))
        metrics = {**self._of_grader(grades), **_of_rewards(grades)}
        metrics["eval/num_problems"] = len(self.examples)
        metrics["eval/errors"] = self.grader.error_count - errors
        metrics["eval/response_length"] = _mean_length(completions)
        if self.pass_at_k > 1 and (scores := self._pass_at_k(sampled)):
            metrics[f"eval/pass_at_{self.pass_at_k}"] = _mean(scores)
        return Evaluation(metrics, self._rows(completions, texts, grades), named(self.pictures))

    def _of_grader(self, grades: list[list[Graded]]) -> dict[str, float]:
        weights = [self.grader.weights(example) for example in self.examples]
        metrics: dict[str, float] = {}
        for name in self.grader.metrics:
            of_problems = [
                [grade.metrics[name] for grade in group if name in grade.metrics] for group in grades
            ]
            graded = [
                (_mean(of_problem), weight[name], problem)
                for of_problem, weight, problem in zip(of_problems, weights, self.problems, strict=True)
                if of_problem
            ]
            values, problems = [value for value, _, _ in graded], [problem for *_, problem in graded]
            total = sum(weight for _, weight, _ in graded)
            if total == 0:
                # A part of a mixture without held-out problems, or judges failed on all responses.
                continue
            right = sum(value * weight for value, weight, _ in graded)
            metrics[f"eval/{name}"] = right / total
            if name != self.grader.primary:
                continue
            if name == ANY_NUMBER and (bounds := mean_interval(values, (), problems)) is not None:
                metrics |= {"eval/primary_low": bounds[0], "eval/primary_high": bounds[1]}
            if name != ANY_NUMBER or all(value in (0.0, 1.0) for group in of_problems for value in group):
                share = effective_share(values, problems)
                low, high = wilson(right * share, round(total) * share)
                metrics |= {
                    "eval/accuracy": right / total,
                    "eval/accuracy_low": low,
                    "eval/accuracy_high": high,
                }
        return metrics

    def _pass_at_k(self, grades: list[list[Graded]]) -> list[float]:
        """Return pass@k of each problem, but for those of which judges have graded fewer than k responses."""
        scores = []
        for group in grades:
            values = [
                metric for grade in group if (metric := grade.metrics.get(self.grader.primary)) is not None
            ]
            if len(values) >= self.pass_at_k:
                right = sum(value >= 1.0 for value in values)
                scores.append(pass_at_k(len(values), right, self.pass_at_k))
        return scores

    def _written(self, completions: list[list[Completion]]) -> list[list[str]]:
        return [written_texts(self.tokenizer, group) for group in completions]

    def _grade(self, completions: list[list[Completion]], written: list[list[str]]) -> list[list[Graded]]:
        texts = [
            text
            for prompt, group, own in zip(self.prompts, completions, written, strict=True)
            for text in judged_texts(self.tokenizer, group, [prompt] * len(group), own)
        ]
        size = len(completions[0])
        grades = self.grader.grade(texts, [example for example in self.examples for _ in range(size)])
        return [grades[at : at + size] for at in range(0, len(grades), size)]

    def _answers(self, engine: Inference, samples: int | None) -> list[list[Completion]]:
        """Return the responses to each problem: one greedy response, or several samples."""
        sampling = Sampling(1, self.max_new_tokens, 0.0)
        if samples is not None:
            seeds = [derive_seed(self.seed, "eval", example.id) for example in self.examples]
            sampling = Sampling(samples, self.max_new_tokens, self.temperature, seeds)
        if self.episodes:
            sampling = replace(sampling, problems=self.examples)
        if any(pictures is not None for pictures in self.pictures):
            sampling = replace(sampling, pictures=self.pictures)
        return engine.generate(self.prompts, sampling)

    def _rows(
        self, completions: list[list[Completion]], written: list[list[str]], grades: list[list[Graded]]
    ) -> list[dict[str, Any]]:
        rows = []
        for example, problem, prompt, shown, group, texts, judged in zip(
            self.examples, self.problems, self.texts, self.pictures, completions, written, grades, strict=True
        ):
            weights = self.grader.weights(example)
            for text, completion, grade in zip(texts, group, judged, strict=True):
                row: dict[str, Any] = {"id": example.id, "prompt": prompt, "response": text}
                if problem != example.id:
                    row["problem"] = problem
                own = grade.score.parts
                row["rewards"] = own or {name: grade.metrics[name] for name in weights if weights[name]}
                if own:
                    row["reward"] = grade.score.total
                if self.grader.primary in grade.metrics:
                    row["grade"] = grade.metrics[self.grader.primary]
                if grade.score.verdicts:
                    row["verdicts"] = grade.score.verdicts
                if completion.record is not None:
                    row["messages"] = completion.record.messages
                if grade.errors:
                    row["errors"] = grade.errors
                if shown is not None:
                    row["pictures"] = list(by_name(shown.files))
                rows.append(row)
        return rows


def named(pictures: Sequence[PromptPictures | None]) -> list[dict[str, bytes]]:
    """Return the pictures of each problem by the names of their files."""
    return [by_name(shown.files) for shown in pictures if shown is not None]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mean_length(completions: list[list[Completion]]) -> float:
    counts = [
        len(completion.token_ids) if completion.sampled is None else sum(completion.sampled)
        for group in completions
        for completion in group
    ]
    return sum(counts) / len(counts)


def _of_rewards(grades: list[list[Graded]]) -> dict[str, float]:
    """Return the mean of the sum of the rewards and of each; nothing if they were not asked."""
    scores = [grade.score for group in grades for grade in group]
    names = sorted({name for score in scores for name in score.parts})
    metrics = {"eval/reward": _mean([score.total for score in scores])} if names else {}
    for name in names:
        metrics[f"eval/reward/{name}"] = _mean([s.parts[name] for s in scores if name in s.parts])
    return metrics
