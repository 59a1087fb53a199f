"""A stage for what only a GPU can show of a training step: waits, exact products, and memory."""

from __future__ import annotations

import time
import warnings
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoModelForCausalLM

from torchrl_grpo.batch.micro_batches import TokenBudget
from torchrl_grpo.config.schema import OptimizerConfig, PolicyConfig
from torchrl_grpo.config.values import PrefixAttention
from torchrl_grpo.errors import TrainingStopped
from torchrl_grpo.inference.noise import hashed
from torchrl_grpo.models.precision import choose_kernels
from torchrl_grpo.models.scoring.head import linear
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.models.scoring.varlen_choice import choose_attention
from torchrl_grpo.objectives.aggregation import BatchTotals, count_totals
from torchrl_grpo.objectives.build import build_objective
from torchrl_grpo.tools.gpu_check.kernels import Figures, batch_of, keep_speeds, seconds
from torchrl_grpo.training.optimizer_step import OptimizerStep

# Sums of a few hundred float32 products in another order; sums that are rounded to bfloat16 differ by 0.1.
_PRODUCT = 1e-2
_NOISE = 1e-5
_MIB = 2**20
# What torch says about a wait. Turning its watch on warns too: that the watch is a prototype.
_WAIT = "called a synchronizing CUDA operation"


def step(model: Path) -> Figures:
    """Take optimizer steps on the first GPU, and check what is particular to a GPU."""
    choose_kernels()
    device = torch.device("cuda:0")
    weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device)
    scorer = TokenScorer(weights, autocast_dtype=torch.bfloat16)
    choose_attention(scorer, PrefixAttention.auto)
    loss, _ = build_objective(PolicyConfig(), scorer, (1.0,), 48)
    optimizer_step = OptimizerStep(
        weights,
        loss,
        OptimizerConfig(),
        total_steps=8,
        groups_per_batch=4,
        num_pieces=1,
        budget=TokenBudget(65_536, shares_prefix=True, notify=print),
        use_scaler=False,
        max_skipped_steps=0,
    )
    batch = groups_of(*batch_of(weights.config.vocab_size))
    # The first step compiles kernels and makes the moments.
    optimizer_step(batch.clone())
    started = time.perf_counter()
    optimizer_step(batch.clone())
    torch.cuda.synchronize()
    figures: Figures = {"step_s": time.perf_counter() - started}
    figures["attention"] = "varlen" if scorer.varlen else "dense"
    waits = _waits(optimizer_step, batch)
    _check("waits in a micro-batch", len(waits), 0, "; ".join(sorted(set(waits))))
    # The batch is so small that the time is that of launches.
    totals = count_totals(batch["masks", "loss"])
    launched = seconds(lambda: _passes(optimizer_step, batch, totals))
    optimizer_step.backend.zero_grad()
    figures["layer_ms"] = layer_ms = 1000 * launched / weights.config.num_hidden_layers
    keep_speeds(layer_ms=layer_ms)
    head = weights.get_output_embeddings().weight.detach().bfloat16()
    hidden = torch.randn(64, head.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = hidden.double() @ head.cpu().double().T
    figures["head_difference"] = _largest(linear(hidden.to(device), head), exact)
    _check("difference of the head's product", figures["head_difference"], _PRODUCT)
    keys = torch.tensor([0, 1, -1, 2**62])
    figures["noise_difference"] = _largest(hashed(keys.to(device), 10_000), hashed(keys, 10_000))
    _check("difference of the noise", figures["noise_difference"], _NOISE)
    return figures | _parked(optimizer_step, batch)


def groups_of(prompt: Tensor, prompt_mask: Tensor, response: Tensor, mask: Tensor) -> TensorDict:
    """Return a batch of groups, as the buffer gives it.

    Args:
        prompt: prompts ``[P, L]``.
        prompt_mask: where they have tokens.
        response: responses ``[P, G, T]``.
        mask: where they have tokens.
    """
    groups = len(prompt)
    zeros = torch.zeros(response.shape)
    return TensorDict(
        {
            "tokens": TensorDict({"prompt": prompt, "response": response}, [groups]),
            "masks": TensorDict({"prompt": prompt_mask, "response": mask, "loss": mask.clone()}, [groups]),
            "log_probs": TensorDict({"response": zeros}, [groups]),
            "advantage": torch.linspace(-1, 1, mask.shape[0] * mask.shape[1]).view(*mask.shape[:2], 1),
        },
        [groups],
    )


def _waits(optimizer_step: OptimizerStep, batch: TensorDict) -> list[str]:
    """Return what torch says about each wait for the GPU in the passes of a micro-batch."""
    totals = count_totals(batch["masks", "loss"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            _passes(optimizer_step, batch, totals)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    optimizer_step.backend.zero_grad()
    return [f"{warning.filename}:{warning.lineno}" for warning in caught if _WAIT in str(warning.message)]


def _passes(optimizer_step: OptimizerStep, batch: TensorDict, totals: BatchTotals) -> None:
    """Run the passes of a micro-batch, forward and backward."""
    optimizer_step.loss(batch, totals=totals)["loss_objective"].backward()


def _parked(optimizer_step: OptimizerStep, batch: TensorDict) -> Figures:
    """Park the moments, and check that their memory is free and that the next step finds their values."""
    before = torch.cuda.memory_allocated()
    # The state holds the moments themselves, whose memory is then freed.
    state = optimizer_step.state_dict()["optimizer"]["state"]
    saved = {
        index: {name: value.to("cpu", copy=True) for name, value in entry.items()}
        for index, entry in state.items()
    }
    started = time.perf_counter()
    optimizer_step.backend.park()
    seconds = time.perf_counter() - started
    freed = before - torch.cuda.memory_allocated()
    moments = sum(8 * parameter.numel() for parameter in optimizer_step.parameters)
    _check("share of the moments that stays", 1 - freed / moments, 0.1)
    parked = optimizer_step.state_dict()["optimizer"]["state"]
    for index, entry in saved.items():
        for name, value in entry.items():
            _check(f"change of {name} of parameter {index}", _largest(parked[index][name], value), 0)
    optimizer_step(batch.clone())
    return {"parked_mib": freed / _MIB, "park_s": seconds}


def _largest(values: Tensor, other: Tensor) -> float:
    return float((values.cpu().double() - other.double()).abs().max())


def _check(what: str, value: float | str, most: float, more: str = "") -> None:
    # The comparison is negated so that NaN fails too.
    if not float(value) <= most:
        raise TrainingStopped(f"{what}: {float(value):.3g}, and at most {most:g} is right {more}".rstrip())
