"""Kernels, waits and micro-batches of a training step on a pretended GPU, per trained token.

``python benchmarks/launch_table.py [BUDGET ...]`` prints a row for each token budget and each round. The
rounds are the default recipe's (8 problems x 8 responses) and one of 32 problems, with prompts of 60 to 200
tokens and responses of 30 to 256. The model has the layers and heads of SmolLM2-135M and is narrow, because
widths start no kernel.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/helpers"))

import torch
from batches import make_batch, make_model, make_objective
from pretended_cuda import PretendedCuda
from tensordict import TensorDict

from torchrl_grpo.batch.micro_batches import MicroBatch, TokenBudget
from torchrl_grpo.config.schema import OptimizerConfig
from torchrl_grpo.models.scoring.fused_norm import fuse_norms
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.training.optimizer_step import OptimizerStep

LAYERS = 30
_SHAPE: dict[str, Any] = {
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 72,
    "head_dim": 8,
    "intermediate_size": 32,
    "initializer_range": 0.02,
    "vocab_size": 256,
    "max_position_embeddings": 1024,
}
_PROMPT, _RESPONSE = (60, 200), (30, 256)


def round_of(problems: int, samples: int = 8) -> TensorDict:
    """Random groups with prompts and responses of realistic lengths."""
    batch = make_batch(P=problems, G=samples, L=_PROMPT[1], T=_RESPONSE[1], kl=False)
    g = torch.Generator().manual_seed(1)
    prompts = torch.randint(*_PROMPT, (problems, 1), generator=g)
    responses = torch.randint(*_RESPONSE, (problems, samples, 1), generator=g)
    batch["masks", "prompt"] = torch.arange(_PROMPT[1]) >= _PROMPT[1] - prompts
    batch["masks", "response"] = torch.arange(_RESPONSE[1]) < responses
    batch["masks", "loss"] = batch["masks", "response"].clone()
    return batch


@dataclass(frozen=True)
class Counts:
    """What one optimizer step takes.

    Attributes:
        tokens: trained tokens.
        micro_batches: number of micro-batches.
        kernels: kernels started.
        waits: times that the CPU waits for the GPU.
        uploads: copies to the GPU.
    """

    tokens: int
    micro_batches: int
    kernels: int
    waits: int
    uploads: int


def measure(budget: int, problems: int, varlen: bool) -> Counts:
    """Count a step of the whole model. Layers are alike, so two and four of them say what 30 take."""
    two, four = (_measure(budget, problems, layers, varlen) for layers in (2, 4))
    assert (two.waits, two.uploads) == (four.waits, four.uploads), (two, four)
    return replace(two, kernels=two.kernels + (LAYERS - 2) * (four.kernels - two.kernels) // 2)


def _measure(budget: int, problems: int, layers: int, varlen: bool) -> Counts:
    """Count a second step: the first one makes the optimizer's moments."""
    batch = round_of(problems)
    with PretendedCuda() as machine:
        model = make_model("llama", **_SHAPE, num_hidden_layers=layers).to("cuda")
        fuse_norms(model)
        scorer = TokenScorer(model, autocast_dtype=torch.bfloat16)
        scorer.varlen = varlen
        loss, _ = make_objective(scorer)
        tokens = TokenBudget(budget, shares_prefix=True, notify=print)
        step = OptimizerStep(
            model,
            loss,
            OptimizerConfig(),
            total_steps=2,
            groups_per_batch=problems,
            num_pieces=1,
            budget=tokens,
            use_scaler=False,
            max_skipped_steps=1,
        )
        step(batch.clone())
        machine.reset()
        step(batch.clone())
        pieces = tokens.split(batch, [MicroBatch(tuple(range(problems)), slice(None))])
        trained = int(batch["masks", "loss"].sum())
        return Counts(trained, len(pieces), machine.launches, machine.syncs.total(), machine.uploads.total())


def main() -> None:
    """Print the table."""
    print(
        "problems  attention  budget  tokens  micro-batches  kernels  waits  uploads  kernels/token  "
        "waits/1000 tokens"
    )
    budgets = [int(word) for word in sys.argv[1:] or ("4096", "65536")]
    for problems, varlen, budget in itertools.product((8, 32), (False, True), budgets):
        cost = measure(budget, problems, varlen)
        attention = "varlen" if varlen else "dense"
        print(
            f"{problems:8}  {attention:9}  {budget:6}  {cost.tokens:6}  {cost.micro_batches:13}  "
            f"{cost.kernels:7}  {cost.waits:5}  {cost.uploads:7}  {cost.kernels / cost.tokens:13.2f}  "
            f"{1000 * cost.waits / cost.tokens:17.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
