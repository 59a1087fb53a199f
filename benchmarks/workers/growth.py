"""One training phase of a random model, whose size and batch are the workload's ``settings``.

Settings: ``vocab``, ``hidden``, ``layers``. Reports the memory that the phase took at its peak beyond what
stays between steps, for which the process's mark is set back before the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.protocol import serve
from benchmarks.workload import Workload, settle, use_all_cores
from torchrl_grpo.batch.micro_batches import TokenBudget
from torchrl_grpo.batch.schema import build_batch
from torchrl_grpo.config import Config
from torchrl_grpo.inference.protocol import Completion
from torchrl_grpo.models.precision import resolve_autocast
from torchrl_grpo.models.prepare import prepare_for_training
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.objectives.build import build_objective
from torchrl_grpo.observe.stats import peak_memory_gib
from torchrl_grpo.rollout.buffer import GroupBuffer
from torchrl_grpo.training.optimizer_step import OptimizerStep

_EMBEDDED = 8192


def build(workload: Workload) -> Callable[[], dict[str, float]]:
    """See :func:`benchmarks.protocol.serve`."""
    use_all_cores()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    vocab, hidden = workload.settings["vocab"], workload.settings["hidden"]
    model = LlamaForCausalLM(
        LlamaConfig(
            # Only the head grows, so that the embedding is no part of the comparison.
            vocab_size=_EMBEDDED,
            hidden_size=hidden,
            intermediate_size=hidden * 8 // 3,
            num_hidden_layers=workload.settings["layers"],
            num_attention_heads=hidden // 64,
            num_key_value_heads=hidden // 64,
            tie_word_embeddings=False,
        )
    )
    model.lm_head = nn.Linear(hidden, vocab, bias=False)
    model.to(device)
    cfg = Config()
    prepare_for_training(model, cfg.train_model)
    P, G = workload.prompts, workload.samples
    scorer = TokenScorer(model, 1.0, resolve_autocast(workload.autocast, device))
    loss, advantage = build_objective(cfg.policy, scorer, (1.0,), workload.response_tokens)
    optimize = OptimizerStep(
        model,
        loss,
        cfg.optimizer,
        total_steps=10**6,
        groups_per_batch=P,
        num_pieces=1,
        budget=TokenBudget(workload.settings["budget"], True, print),
        use_scaler=False,
        max_skipped_steps=0,
    )
    prompts = torch.randint(0, _EMBEDDED, (P, workload.prompt_tokens)).tolist()
    tokens = torch.randint(0, min(vocab, _EMBEDDED), (P, G, workload.response_tokens)).tolist()
    completions = [[Completion(row, [-8.0] * len(row), "length") for row in group] for group in tokens]
    rewards = torch.rand(P, G, 1)
    number = torch.arange(P)[:, None].expand(P, G)
    batch = build_batch(prompts, completions, rewards, rewards, number, 0, 0)
    buffer = GroupBuffer(P, P, [advantage], 0)

    def step() -> dict[str, float]:
        buffer.replace_contents(batch.clone())
        ready = buffer.sample()
        before = _set_back(device)
        started = time.perf_counter()
        optimize(ready)
        settle()
        seconds = time.perf_counter() - started
        return {"train": seconds, "between_gib": before, "phase_gib": _peak(device)}

    return step


def _set_back(device: torch.device) -> float:
    """Set the peak memory back to what is in use now, and return that."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device) / 2**30
    Path("/proc/self/clear_refs").write_text("5")
    return peak_memory_gib()


def _peak(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return peak_memory_gib()


if __name__ == "__main__":
    serve(build)
