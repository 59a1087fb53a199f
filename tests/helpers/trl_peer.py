"""TRL's trainers, which get the answers of :class:`peers.Numbers` where they would run a model.

Importing TRL takes seconds, so only the tests that compare with it do.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peers import LONGEST, Numbers, Outcome, gradients_of
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of versions of vLLM, which no loss needs
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
    from trl.trainer.utils import split_tensor_dict


class _Given:
    """Answers of :class:`Numbers` where a trainer would run a model."""

    numbers: Numbers
    # The rows of the micro-batch whose loss is computed.
    rows = slice(None)
    ref_model: Any

    def _get_per_token_logps_and_entropies(
        self, model: Any, *_: Any, compute_entropy: bool = False, **__: Any
    ) -> tuple[Tensor, Tensor | None, None]:
        numbers = self.numbers
        if compute_entropy:
            return numbers.log_probs[self.rows], numbers.entropy[self.rows], None
        return numbers.reference if model is self.ref_model else numbers.trainer, None, None


class _Grpo(_Given, GRPOTrainer):
    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        numbers = self.numbers
        texts, log_probs = [""] * len(prompts), numbers.ragged(numbers.engine)
        return numbers.prompts, numbers.responses, None, texts, log_probs, {}, None, None


class _Rloo(_Given, RLOOTrainer):
    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        return self.numbers.prompts, self.numbers.responses, [""] * len(prompts)


class Trl:
    """Makes TRL's trainers around one tiny model.

    Args:
        model_dir: of tests/helpers/tiny_model.py.
        folder: where trainers may write.
    """

    def __init__(self, model_dir: Path, folder: Path) -> None:
        # In training mode, as TRL scales nothing by micro-batches otherwise.
        self.model = AutoModelForCausalLM.from_pretrained(model_dir).train()
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self.folder = folder

    def trainer(self, numbers: Numbers, kind: str = "grpo", pieces: int = 1, **settings: Any) -> Any:
        """A trainer that gets ``numbers``.

        Args:
            numbers: what its model, engine and rewards say.
            kind: ``grpo`` or ``rloo``.
            pieces: micro-batches of an optimizer step.
            settings: of TRL's configuration. ``use_vllm`` is set behind the constructor's back, which would
                start an engine.
        """
        rewards = [
            lambda completions, column=column, **_: column.tolist() for column in numbers.rewards.unbind(-1)
        ]
        for number, reward in enumerate(rewards):
            reward.__name__ = f"reward_{number}"
        use_vllm = settings.pop("use_vllm", False)
        config = {"grpo": GRPOConfig, "rloo": RLOOConfig}[kind](
            **{
                "output_dir": str(self.folder),
                "use_cpu": True,
                "bf16": False,
                "report_to": "none",
                "gradient_checkpointing": False,
                "per_device_train_batch_size": len(numbers.rewards) // pieces,
                "gradient_accumulation_steps": pieces,
                "max_completion_length": LONGEST,
                # Several updates from one round, so that the ratio is not 1.
                "num_iterations": 2,
                **settings,
            }
        )
        with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they were
            trainer: Any = {"grpo": _Grpo, "rloo": _Rloo}[kind](
                model=self.model,
                reward_funcs=rewards,
                args=config,
                train_dataset=Dataset.from_dict({"prompt": ["x"]}),
                processing_class=self.tokenizer,
            )
        trainer.numbers, trainer.use_vllm = numbers, use_vllm
        # What the loop of transformers' Trainer sets.
        trainer.current_gradient_accumulation_steps = pieces
        return trainer

    def outcome(self, numbers: Numbers, kind: str = "grpo", pieces: int = 1, **settings: Any) -> Outcome:
        """Rewards to advantages to the loss of an optimizer step; arguments as of :meth:`trainer`."""
        trainer = self.trainer(numbers, kind, pieces, **settings)
        scored = trainer._generate_and_score_completions([{"prompt": "x"}] * len(numbers.rewards))
        size = len(numbers.rewards) // pieces
        value = torch.zeros(())
        for number, piece in enumerate(split_tensor_dict(scored, pieces)):
            trainer.rows = slice(number * size, (number + 1) * size)
            loss = trainer._compute_loss(trainer.model, piece)
            loss.backward()
            value += loss.detach()
        return gradients_of(value, numbers.log_probs, numbers.entropy)
