"""Norms in fewer passes, on a pretended GPU and on a CPU: the same numbers, and only where that is so."""

from __future__ import annotations

import pytest
import torch
from batches import make_batch, make_model
from pretended_cuda import PretendedCuda
from rounding import EXACT
from torch import Tensor

from torchrl_grpo.models.scoring import fused_norm
from torchrl_grpo.models.scoring.fused_norm import fuse_norms
from torchrl_grpo.models.scoring.token_scorer import TokenScorer

KEYS = (("tokens", "prompt"), ("masks", "prompt"), ("tokens", "response"), ("masks", "response"))


def numbers(fuses: bool, family: str) -> tuple[list[Tensor], int, int]:
    """Log-probabilities and gradients, the norms that are fused, and the kernels started."""
    with PretendedCuda() as machine:
        model = make_model(family).to("cuda")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.add_(torch.linspace(-0.5, 0.5, len(parameter)).to("cuda"))
        fused = fuse_norms(model) if fuses else 0
        machine.reset()
        batch = make_batch()
        log_probs = TokenScorer(model)(*(batch[key] for key in KEYS)).log_probs
        log_probs.square().sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return [log_probs.detach(), *gradients], fused, machine.launches


@pytest.mark.usefixtures("float64")
# Two layers with two norms each and the last norm. Qwen3 has norms of queries and keys, too.
@pytest.mark.parametrize(("family", "norms"), [("llama", 5), ("qwen3", 9)])
def test_fused_norms_give_the_same_numbers_with_fewer_kernels(family: str, norms: int) -> None:
    plain, none, kernels = numbers(False, family)
    fused, count, fewer = numbers(True, family)
    assert (none, count) == (0, norms)
    for tensor, other in zip(plain, fused, strict=True):
        torch.testing.assert_close(other, tensor, **EXACT)
    assert kernels - fewer >= 10 * norms


@pytest.mark.parametrize("family", ["gemma", "gemma3", "gpt2"])
def test_norms_of_another_kind_stay(family: str) -> None:
    with PretendedCuda():
        assert fuse_norms(make_model(family).to("cuda")) == 0


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("block", [1, 7 * 32, 2**17])
def test_blocks_on_a_cpu_give_the_same_numbers(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_norm, "_BLOCK_ELEMENTS", block)
    results = []
    for fuses in (False, True):
        model = make_model()
        assert (fuse_norms(model) if fuses else 5) == 5
        norm = model.model.norm
        weight = norm.weight.detach().copy_(torch.linspace(0.5, 1.5, len(norm.weight)))
        generator = torch.Generator().manual_seed(0)
        states, slopes = torch.randn(2, 2, 10, len(weight), generator=generator)
        with torch.autocast("cpu", torch.bfloat16):
            result = norm(states.requires_grad_())
        assert ("BlockedNorm" in type(result.grad_fn).__name__) == fuses
        results.append([result, *torch.autograd.grad((slopes * result).sum(), (states, norm.weight))])
    for plain, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, **EXACT)


def test_without_autocast_a_cpu_computes_the_same_bits() -> None:
    plain, fused = make_model(), make_model()
    assert fuse_norms(fused) == 5
    batch = make_batch()
    before, after = (TokenScorer(model)(*(batch[key] for key in KEYS)).log_probs for model in (plain, fused))
    assert torch.equal(before, after)
