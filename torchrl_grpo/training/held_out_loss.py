"""Measures the loss of held-out solutions, for supervised fine-tuning where no reward can grade."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from torchrl_grpo.batch.schema import build_batch, sampled_counts
from torchrl_grpo.data.example import Example
from torchrl_grpo.data.identity import problem_names
from torchrl_grpo.envs.chat import prompt_pictures, render
from torchrl_grpo.envs.solution_tokens import solutions
from torchrl_grpo.inference.protocol import Completion, Inference
from torchrl_grpo.observe.stats import mean_interval
from torchrl_grpo.training.evaluator import Evaluation, named
from torchrl_grpo.training.learner import Learner


class HeldOutLoss:
    """The mean negative log-likelihood per token of held-out solutions under the trained model.

    Args:
        examples: held-out problems with solutions.
        tokenizer: tokenizer of the model.
        learner: model of rank 0.
        end_token_id: token that ends a message.
        max_new_tokens: longest solution in tokens; the rest of a longer one does not count.
    """

    what = "the loss of held-out solutions"

    def __init__(
        self,
        examples: Sequence[Example],
        tokenizer: PreTrainedTokenizerBase,
        learner: Learner,
        end_token_id: int,
        max_new_tokens: int,
    ) -> None:
        self.examples = examples
        self.problems = problem_names(examples)
        self._learner = learner
        rendered = [render(tokenizer, example) for example in examples]
        self._prompts = [text for text, _ in rendered]
        self._solutions = list(solutions(tokenizer, examples, end_token_id))
        tokens = [solution.tokens[:max_new_tokens] for solution in self._solutions]
        zeros = torch.zeros(len(examples), 1, 1)
        pictures = [
            prompt_pictures(tokenizer, example, prompt)
            for example, (_, prompt) in zip(examples, rendered, strict=True)
        ]
        self._shown = named(pictures)
        self._groups = build_batch(
            [prompt for _, prompt in rendered],
            [[Completion(each, [0.0] * len(each), "stop")] for each in tokens],
            zeros,
            zeros,
            torch.arange(len(examples))[:, None],
            0,
            tokenizer.pad_token_id,
            None if pictures[0] is None else [each.files if each else () for each in pictures],
        )

    def __call__(self, engine: Inference) -> Evaluation:
        """Measure the weights of the trainer; the engine has nothing to do.

        Returns:
            ``eval/loss`` in nats per token with its 95 % interval (``eval/loss_low``, ``eval/loss_high``),
            ``eval/perplexity``, which is its exponential, and ``eval/num_problems``; and the solutions, each
            with its own mean loss and number of tokens.
        """
        # Each group is one solution. Sums over one width do not depend on how the solutions are divided.
        log_probs = pad_sequence([row for (row,) in self._learner.log_probs(self._groups)], batch_first=True)
        losses = -log_probs.double().sum(-1)
        counts = sampled_counts(self._groups).flatten()
        mean = float(losses.sum() / counts.sum())
        means, tokens = (losses / counts).tolist(), counts.tolist()
        rows: list[dict[str, Any]] = [
            {
                **{"id": example.id, "prompt": prompt, "response": solution.text, "rewards": {}},
                **{"grade": loss, "tokens": count},
            }
            for example, prompt, solution, loss, count in zip(
                self.examples, self._prompts, self._solutions, means, tokens, strict=True
            )
        ]
        for row, problem in zip(rows, self.problems, strict=True):
            if problem != row["id"]:
                row["problem"] = problem
        for row, shown in zip(rows, self._shown, strict=False):
            row["pictures"] = list(shown)
        metrics = {"eval/loss": mean, "eval/perplexity": math.exp(min(mean, 700.0))}
        if (bounds := mean_interval(means, tokens, self.problems)) is not None:
            metrics |= {"eval/loss_low": bounds[0], "eval/loss_high": bounds[1]}
        return Evaluation({**metrics, "eval/num_problems": len(self.examples)}, rows, self._shown)
