"""TRL's ``GRPOTrainer`` as its constructor makes it, a step at a time.

Held equal: model, prompts, group size, response length, float32 or bf16 autocast, AdamW and its rate, no KL.
Its own: micro-batches of 8 sequences, gradient checkpointing on, generation by transformers: TRL's defaults,
unless ``Workload.settings``, keys of ``GRPOConfig``, say otherwise. With vLLM ``generate`` is all of TRL's
preparation: publication, scoring and the policy's log-probabilities too.
"""

from __future__ import annotations

import queue
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.protocol import serve
from benchmarks.workload import TRL_IS_QUIET, Workload, reward, settle, use_all_cores


class _Paced(TrainerCallback):
    """Lets the trainer take one step at a time, in its own thread and loop."""

    def __init__(self) -> None:
        self.go: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.go.get()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.done.put(None)


class _Timed(GRPOTrainer):
    """Adds up the seconds of generating and scoring; with recorded rollouts, takes those."""

    generating = 0.0
    prompt_tokens = 0.0
    recorded: dict[str, torch.Tensor] | None = None

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        if self.recorded is not None:
            return {key: value.clone() for key, value in self.recorded.items()}
        started = time.perf_counter()
        output = super()._generate_and_score_completions(inputs)
        self.generating += time.perf_counter() - started
        lengths = {key: output[f"{key}_mask"].sum(1) for key in ("prompt", "completion")}
        assert (lengths["completion"] == self.max_completion_length).all(), lengths
        self.prompt_tokens = lengths["prompt"].double().mean().item()
        return output


def build(workload: Workload) -> Callable[[], dict[str, float]]:
    """See :func:`benchmarks.protocol.serve`."""
    tokenizer = AutoTokenizer.from_pretrained(workload.model)
    model = AutoModelForCausalLM.from_pretrained(workload.model, dtype=torch.float32)
    batch = workload.prompts * workload.samples
    settings = dict(workload.settings)
    size = settings.pop("per_device_train_batch_size", min(8, batch))
    on_gpu = torch.cuda.is_available()
    use_vllm = bool(settings.get("use_vllm", False))
    # vLLM's name for it is ignore_eos, transformers' min_new_tokens.
    exact = {"ignore_eos": True} if use_vllm else {"min_new_tokens": workload.response_tokens}
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=not on_gpu,
        bf16=workload.autocast == "bf16",
        **TRL_IS_QUIET,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=batch // size,
        num_generations=workload.samples,
        max_completion_length=workload.response_tokens,
        generation_kwargs=exact,
        max_steps=10**6,
        learning_rate=workload.lr,
        lr_scheduler_type="constant",
        seed=0,
        **settings,
    )
    paced = _Paced()
    trainer = _Timed(
        model=model,
        reward_funcs=lambda completions, **_: [
            reward(completion[0]["content"]) for completion in completions
        ],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": chat} for chat in workload.messages(tokenizer)]),
        processing_class=tokenizer,
        callbacks=[paced],
    )
    if workload.rollouts is not None:
        recorded = _tensors(torch.load(workload.rollouts, weights_only=True))
        trainer.recorded = {name: values.to(trainer.accelerator.device) for name, values in recorded.items()}

    def train() -> None:
        # In this thread: OpenMP keeps the number of threads by thread.
        use_all_cores()
        try:
            trainer.train()
        except BaseException as error:  # noqa: BLE001  handed to the thread that waits
            paced.done.put(error)

    threading.Thread(target=train, daemon=True).start()

    def step() -> dict[str, float]:
        trainer.generating = 0.0
        started = time.perf_counter()
        paced.go.put(None)
        if (error := paced.done.get()) is not None:
            raise error
        settle()
        phases = {"generate": trainer.generating, "train": time.perf_counter() - started - trainer.generating}
        return phases if trainer.recorded is not None else {**phases, "prompt_tokens": trainer.prompt_tokens}

    return step


def _tensors(recorded: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What TRL's loss reads, from recorded rollouts of equal length."""
    samples = len(recorded["responses"][0])
    prompts = [prompt for prompt in recorded["prompts"] for _ in range(samples)]
    width = max(map(len, prompts))
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    ids = torch.tensor([[0] * (width - len(row)) + row for row in prompts])
    responses = torch.tensor([row for group in recorded["responses"] for row in group])
    rewards = torch.tensor(recorded["rewards"])
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    return {
        "prompt_ids": ids,
        "prompt_mask": mask,
        "completion_ids": responses,
        "completion_mask": torch.ones_like(responses),
        "advantages": advantages.flatten(),
        "num_items_in_batch": torch.tensor(float(responses.numel())),
    }


if __name__ == "__main__":
    serve(build)
