"""Liger's head: the results of the head in blocks, used if it is supported, dropped if they do not agree."""

from __future__ import annotations

import copy
import importlib.util
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batches import make_batch, make_model
from pretended_cuda import PretendedCuda
from rounding import EXACT
from torch import Tensor

from torchrl_grpo.config import Config
from torchrl_grpo.config.values import Dtype
from torchrl_grpo.models.reference import load_reference
from torchrl_grpo.models.scoring import fused_head
from torchrl_grpo.models.scoring.head import HeadOptions, score_tokens
from torchrl_grpo.models.scoring.token_scorer import TokenScorer

KEYS = (("tokens", "prompt"), ("masks", "prompt"), ("tokens", "response"), ("masks", "response"))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_it_computes_what_blocks_compute_with_gradients(
    temperature: float, entropy_gradient: bool, scale: float
) -> None:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(700, 24, generator=g), torch.randn(301, 24, generator=g)
    targets, slopes = torch.randint(0, 301, (700,), generator=g), torch.randn(2, 700, generator=g)
    options = HeadOptions(temperature, None, torch.float64, entropy_gradient, scale)
    results = []
    for score in (
        lambda h, w: score_tokens(h, targets, w, None, options, 5000),
        lambda h, w: fused_head.score_tokens(h, targets, w, options),
    ):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        log_probs, entropy = score(*leaves)  # type: ignore[no-untyped-call]
        assert log_probs.dtype == entropy.dtype == torch.float32
        assert entropy.requires_grad == entropy_gradient
        (slopes[0] * log_probs + slopes[1] * entropy).sum().backward()
        results.append([log_probs.detach(), entropy.detach(), *(leaf.grad for leaf in leaves)])
    for blocks, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, blocks, **EXACT)


@pytest.mark.parametrize(
    ("changes", "supported"),
    [
        ({}, True),
        ({"dtype": torch.float32}, False),
        ({"dtype": torch.float16}, False),
        ({"softcap": 30.0}, False),
        ({"bias": True}, False),
        ({"is_cuda": False}, False),
        ({"capability": (8, 0)}, False),
        ({"capability": (10, 0)}, False),
        ({"missing": "cutlass"}, False),
        ({"missing": "liger_kernel"}, False),
    ],
)
def test_it_is_taken_where_it_was_made_for(
    changes: dict[str, Any], supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    capability, missing = changes.get("capability", (9, 0)), changes.get("missing")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else SimpleNamespace()
    )
    weight: Any = SimpleNamespace(is_cuda=changes.get("is_cuda", True), device="cuda:0")
    options = HeadOptions(0.9, changes.get("softcap"), changes.get("dtype", torch.bfloat16))
    assert fused_head.supports(weight, torch.zeros(3) if "bias" in changes else None, options) is supported


def numbers(scorer: TokenScorer) -> list[Tensor]:
    batch = make_batch()
    scores = scorer(*(batch[key] for key in KEYS))
    scores.log_probs.square().sum().backward()
    return [*(value.detach() for value in scores), *(p.grad for p in scorer.parameters())]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("bonus", [False, True])
def test_a_scorer_with_it_gives_the_numbers_of_one_without(
    family: str, bonus: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_head, "supports", lambda *_: True)
    plain, fused = (TokenScorer(make_model(family), 0.7, entropy_gradient=bonus) for _ in range(2))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="train_model.fused_head")
        fused.fuse_head()
    assert fused.fused_head and not plain.fused_head
    assert all(p.grad is None for p in fused.parameters()), "the trial leaves nothing behind"
    for ours, theirs in zip(numbers(fused), numbers(plain), strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


def test_responses_of_no_token_are_no_error_with_it() -> None:
    scorer = TokenScorer(make_model())
    scorer.fused_head = True
    batch = make_batch()
    batch["masks", "response"][:] = False
    assert scorer(*(batch[key] for key in KEYS)).log_probs.eq(0).all()


def test_a_kernel_that_cannot_is_said_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class CompilerError(Exception):
        """Of a library that derives its errors from nothing in particular."""

    def fails(*_: object) -> None:
        raise CompilerError("no such instruction\nand more")

    monkeypatch.setattr(fused_head, "supports", lambda *_: True)
    monkeypatch.setattr(fused_head, "score_tokens", fails)
    scorer = TokenScorer(make_model())
    with pytest.warns(UserWarning, match=r"fused_head=true: .* not used \(no such instruction\)"):
        scorer.fuse_head()
    assert not scorer.fused_head and numbers(scorer)


def test_memory_that_runs_out_in_the_trial_is_no_fault_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(fused_head, "supports", lambda *_: True)
    monkeypatch.setattr(fused_head, "score_tokens", full)
    with pytest.raises(torch.OutOfMemoryError):
        TokenScorer(make_model()).fuse_head()


def with_slope(values: Tensor, slope: Any) -> Tensor:
    """``values`` whose gradient is that of ``slope``."""
    changed: Tensor = values.detach() + slope - slope.detach()
    return changed


WRONG: dict[str, Any] = {
    "log-probabilities": lambda log_probs, entropy, weight: (log_probs * 1.1, entropy),
    "entropies": lambda log_probs, entropy, weight: (log_probs, entropy + 1),
    # As if each token had told the weights the same: the values are right.
    "gradients of states": lambda log_probs, entropy, weight: (
        with_slope(log_probs, log_probs.mean()),
        entropy,
    ),
    "gradient of the head": lambda log_probs, entropy, weight: (
        with_slope(log_probs, log_probs + weight.sum()),
        entropy,
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_kernel_with_other_numbers_is_not_used(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fused_head.score_tokens

    def off(hidden: Tensor, targets: Tensor, weight: Tensor, options: HeadOptions) -> Any:
        return WRONG[wrong](*real(hidden, targets, weight, options), weight)

    monkeypatch.setattr(fused_head, "supports", lambda *_: True)
    monkeypatch.setattr(fused_head, "score_tokens", off)
    scorer = TokenScorer(make_model())
    with pytest.warns(UserWarning, match=f"its {wrong} would differ"):
        scorer.fuse_head()
    assert not scorer.fused_head


def test_a_gradient_that_is_no_number_is_not_taken_for_a_small_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fused_head.score_tokens

    def off(*arguments: Any) -> tuple[Tensor, Tensor]:
        log_probs, entropy = real(*arguments)
        log_probs.register_hook(lambda gradient: gradient * torch.nan)
        return log_probs, entropy

    monkeypatch.setattr(fused_head, "supports", lambda *_: True)
    monkeypatch.setattr(fused_head, "score_tokens", off)
    scorer = TokenScorer(make_model())
    with pytest.warns(UserWarning, match="its gradients of states would differ by nan"):
        scorer.fuse_head()
    assert not scorer.fused_head


@pytest.mark.parametrize("fused", [True, False])
def test_policy_and_reference_round_alike(
    fused: bool, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_head, "supports", lambda *_: True)
    cfg = Config()
    cfg.model.name, cfg.ref_model.dtype = str(tiny_model_dir), Dtype("float32")
    cfg.train_model.fused_head = fused
    reference = load_reference(cfg, str(tiny_model_dir), torch.device("cpu"), None, True)
    assert reference.fused_head is fused
    batch = make_batch()
    # With gradients to compare in its own trial, which the frozen reference has not.
    policy = TokenScorer(copy.deepcopy(reference.model).requires_grad_(True), cfg.inference_model.temperature)
    if fused:
        policy.fuse_head()
    assert policy.fused_head is fused
    both = [scorer(*(batch[key] for key in KEYS)).log_probs for scorer in (policy, reference)]
    assert torch.equal(*both)


def test_the_kernel_starts_on_the_gpu_of_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton starts a kernel on the current device, and a reference model has another one."""
    import liger_kernel.ops.fused_linear_scaled_cross_entropy as liger

    current = []

    class Recorded:
        @staticmethod
        def apply(hidden: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
            current.append(torch.cuda.current_device())
            return hidden.sum(1).float(), hidden.sum(1).float()

    monkeypatch.setattr(liger, "LigerFusedLinearScaledCrossEntropyFunction", Recorded)
    with PretendedCuda(gpus=3):
        hidden, weight = torch.ones(2, 4, device="cuda:2"), torch.ones(5, 4, device="cuda:2")
        targets = torch.zeros(2, dtype=torch.int64, device="cuda:2")
        fused_head.score_tokens(hidden, targets, weight, HeadOptions(dtype=torch.bfloat16))
        assert torch.cuda.current_device() == 0
    assert current == [2]
