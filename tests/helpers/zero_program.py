"""What each rank of the DeepSpeed tests runs: the cases of ``rank_program.py``, then checks of its own.

RANK=0 WORLD_SIZE=2 ... python tests/helpers/zero_program.py OUTPUT KIND ...
"""

from __future__ import annotations

import gc
import math
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from rank_program import CASES, CPU, batch_of, build, measure_all
from torch import Tensor

from torchrl_grpo.distributed.parallelism import full_tensor, writable
from torchrl_grpo.distributed.ranks import Ranks
from torchrl_grpo.models.precision import lost_to_rounding
from torchrl_grpo.models.shards import count_parameters, local_shard
from torchrl_grpo.training.optimizer_step import OptimizerStep
from torchrl_grpo.training.throughput import ThroughputMeter


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: full_tensor(p).clone() for name, p in model.named_parameters()}


def same(tensors: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensors[name], other[name]) for name in tensors)


def by_hand(case: str, *, steps: int) -> tuple[OptimizerStep, Any]:
    """One process alone, after ``steps`` steps with a gradient."""
    alone = Ranks(on_cpu=True)
    alone.size, alone.rank = 1, 0
    step, model = build(case, "ddp", alone)
    for _ in range(steps):
        step(batch_of(case))
    return step, model


def check_refusal(kind: str, ranks: Ranks) -> None:
    step, model = build("llama", kind, ranks)
    before, batch = weights_of(model), batch_of("llama")
    bad = batch.clone()
    bad["advantage"][0] = math.nan
    metrics = step(bad)
    assert metrics["optimizer/skipped"] == 1 and not math.isfinite(metrics["optimizer/grad_norm"])
    assert same(before, weights_of(model)), "a refused step changed the weights"
    metrics = step(batch)
    assert metrics["optimizer/skipped"] == 1 and math.isfinite(metrics["optimizer/grad_norm"])
    reference, whole_model = by_hand("llama", steps=0)
    reference(bad)
    reference(batch)
    for name, expected in weights_of(whole_model).items():
        torch.testing.assert_close(weights_of(model)[name], expected, rtol=1e-5, atol=1e-6)


def check_no_gradient(kind: str, ranks: Ranks) -> None:
    case = "qwen3, few groups move"
    step, model = build(case, kind, ranks)
    reference, whole_model = by_hand(case, steps=0)
    batch = batch_of(case)
    still = batch.clone()
    still["advantage"].zero_()
    for inputs in (batch, still):
        ours, theirs = step(inputs), reference(inputs)
        assert abs(ours["optimizer/grad_norm"] - theirs["optimizer/grad_norm"]) < 1e-5
        assert abs(ours["policy/entropy"] - theirs["policy/entropy"]) < 1e-5
    for name, expected in weights_of(whole_model).items():
        torch.testing.assert_close(weights_of(model)[name], expected, rtol=1e-5, atol=1e-6)


def check_states(kind: str, ranks: Ranks) -> None:
    """What one process has saved is what is here after it was loaded, bit for bit."""
    first, _ = by_hand("gpt2", steps=1)
    step, _ = build("gpt2", kind, ranks)
    step.load_state_dict(first.state_dict())
    saved, loaded = first.state_dict()["optimizer"], step.state_dict()["optimizer"]
    assert loaded["param_groups"] == saved["param_groups"]
    if not ranks.is_main:
        assert not loaded["state"], "held for nothing"
        return
    for index, entry in saved["state"].items():
        for name, value in entry.items():
            assert torch.equal(loaded["state"][index][name], value), (index, name)


def check_looks(kind: str, ranks: Ranks) -> None:
    """Code that looks at parameters from outside sees all of them, wherever they are."""
    _, model = build("llama", kind, ranks)
    _, other = by_hand("llama", steps=0)
    assert count_parameters(model) == other.num_parameters()
    ours = ThroughputMeter(model, CPU, torch.float32, ranks.size)
    theirs = ThroughputMeter(other, CPU, torch.float32)
    assert ours._parameters == theirs._parameters
    assert ours._operations([5], [[3, 4]], backward=True) == theirs._operations([5], [[3, 4]], backward=True)
    share = lost_to_rounding(model, torch.bfloat16, 1e-5)
    assert abs(share - lost_to_rounding(other, torch.bfloat16, 1e-5)) < 0.1
    if kind == "deepspeed_zero3":
        held = sum(local_shard(p).numel() for p in model.parameters())
        assert held < 1.1 * count_parameters(other) / ranks.size + 100
        matrices = [p for p in model.parameters() if vars(p)["ds_numel"] > 1000]
        assert matrices and all(p.numel() == 0 for p in matrices), "whole where nobody uses it"
    before = weights_of(model)
    for factor in (0.5, 2.0):
        for parameter in model.parameters():
            with torch.no_grad(), writable(parameter) as values:
                values[..., ::8] *= factor
        assert same(before, weights_of(model)) == (factor == 2.0)


def check_end(kind: str, ranks: Ranks) -> None:
    step, model = build("llama", kind, ranks)
    step(batch_of("llama"))
    gone = weakref.ref(model), weakref.ref(step)
    del step, model
    # The first finds what ends the engine, the second what it held.
    gc.collect()
    gc.collect()
    assert [thing() is None for thing in gone] == [True, True], "memory that the next job needs"


if __name__ == "__main__":
    torch.set_num_threads(1)
    here = Ranks(on_cpu=True)
    measured = measure_all(sys.argv[2:], tuple(CASES), here)
    for kind in sys.argv[2:]:
        check_looks(kind, here)
        check_refusal(kind, here)
        check_no_gradient(kind, here)
        check_states(kind, here)
        check_end(kind, here)
    if here.is_main:
        torch.save(measured, Path(sys.argv[1]))
