"""Attention for variable lengths: equal to that with masks, gradients included, and where it is used."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import families
import flash_kernel
import pytest
import torch
from batches import gradients, inputs, make_batch, make_model
from pretended_cuda import PretendedCuda
from rounding import EXACT, assert_rounds_alike
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedModel

from torchrl_grpo.config.schema import TrainModelConfig
from torchrl_grpo.config.values import PrefixAttention
from torchrl_grpo.errors import ModelError
from torchrl_grpo.models.prepare import prepare_for_training
from torchrl_grpo.models.scoring import varlen, varlen_choice
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.models.scoring.varlen import VarlenLayout
from torchrl_grpo.models.scoring.varlen_choice import choose_attention

# Heads that share keys or do not, windows in some layers or in all, a scale and a head size of their own.
FAMILIES = ("llama", "qwen3", "mistral_sliding", "gemma3", "gpt2", "phi3")
OTHERS = ("gemma3n", "qwen2 window", "granite", "cohere2", "smollm3 window", "qwen3-moe")


@pytest.fixture(autouse=True)
def _kernel() -> Iterator[None]:
    with flash_kernel.on_the_cpu():
        yield


def scored(
    model: PreTrainedModel, batch: TensorDict, use_varlen: bool, autocast: torch.dtype | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities, and the gradients of a loss that weighs every token differently."""
    model.zero_grad()
    scorer = TokenScorer(model, autocast_dtype=autocast)
    scorer.varlen = use_varlen
    log_probs = scorer(*inputs(batch)).log_probs
    (log_probs * torch.linspace(-1, 1, log_probs.numel()).view_as(log_probs)).sum().backward()
    return log_probs.detach(), gradients(model)


def assert_equal(model: PreTrainedModel, batch: TensorDict) -> None:
    expected, right = scored(model, batch, use_varlen=False)
    log_probs, ours = scored(model, batch, use_varlen=True)
    torch.testing.assert_close(log_probs, expected, **EXACT)
    for name, gradient in right.items():
        torch.testing.assert_close(ours[name], gradient, **EXACT, msg=name)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_it_equals_attention_with_masks(name: str) -> None:
    model = make_model(name) if name in FAMILIES else families.build(*families.FAMILIES[name][:2])
    assert_equal(model, make_batch(P=4, G=3, L=9, T=8))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("window", [1, 2, 4, 9, 16, 17])
def test_windows_of_any_size(window: int) -> None:
    model = make_model("mistral_sliding", sliding_window=window, num_hidden_layers=1)
    batch = make_batch(P=3, G=3, L=9, T=9)
    assert_equal(model, batch)
    # With 16 keys before the last one, all tokens are seen from a window of 17.
    layout = VarlenLayout(*inputs(batch), torch.device("cpu"))
    assert (layout.window(window) is None) == (window == 17)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("family", ["llama", "mistral_sliding"])
def test_responses_of_one_token_or_none(family: str) -> None:
    """They give no token to the row: some of a group, all of one, or all of all."""
    lengths = torch.tensor([[1, 1, 0], [5, 1, 0], [0, 0, 0], [2, 6, 3]])
    for some in (lengths, lengths.clamp(max=1), lengths[1:2]):
        batch = make_batch(P=len(some), G=3)
        batch["masks", "response"] = torch.arange(6) < some[..., None]
        assert_equal(make_model(family), batch)


@pytest.mark.usefixtures("float64")
def test_a_group_of_one_prompt_token() -> None:
    batch = make_batch(P=3, G=2, L=1)
    assert_equal(make_model(), batch)


@pytest.mark.parametrize("family", ["qwen2", "mistral_sliding"])
def test_under_autocast_it_errs_as_masks_do(family: str) -> None:
    model, batch = make_model(family), make_batch(G=6)
    exact, plain, ours = (
        {"log-probabilities": log_probs, **slopes}
        for log_probs, slopes in (
            scored(model, batch, use_varlen=False),
            scored(model, batch, use_varlen=False, autocast=torch.bfloat16),
            scored(model, batch, use_varlen=True, autocast=torch.bfloat16),
        )
    )
    assert_rounds_alike(ours, plain, exact)


@pytest.mark.usefixtures("float64")
def test_with_gradient_checkpointing() -> None:
    model, batch = make_model("gemma3"), make_batch()
    expected, right = scored(model, batch, use_varlen=True)
    prepare_for_training(model, TrainModelConfig(gradient_checkpointing=True))
    log_probs, ours = scored(model, batch, use_varlen=True)
    torch.testing.assert_close(log_probs, expected, **EXACT)
    for name, gradient in right.items():
        torch.testing.assert_close(ours[name], gradient, **EXACT, msg=name)


def test_a_layer_keeps_nothing_twice() -> None:
    """Autograd keeps operands, output and one number a head, and no copy of a prompt for its responses."""
    batch = make_batch(P=2, G=8, L=20, T=6)
    layout = VarlenLayout(*inputs(batch), torch.device("cpu"))
    N, kept = layout.ids.shape[1], 0

    def note(x: Tensor) -> Tensor:
        nonlocal kept
        kept += x.untyped_storage().nbytes()
        return x

    query, key, value = (torch.randn(1, heads, N, 8, requires_grad=True) for heads in (4, 2, 2))
    for window in (None, 5):
        kept = 0
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            varlen.attend(query, key, value, layout, window, None, torch.bfloat16)
        assert kept == N * (2 * (4 + 2 + 2 + 4) * 8 + 4 * 4)


def test_gradients_of_a_prompts_keys_are_added_in_their_own_format() -> None:
    batch = make_batch(P=1, G=8, L=3, T=6)
    layout = VarlenLayout(*inputs(batch), torch.device("cpu"))
    N = layout.ids.shape[1]
    for window in (None, 4):
        q, k, v = operands = tuple(torch.randn(1, heads, N, 8, requires_grad=True) for heads in (4, 2, 2))
        out = varlen.attend(q, k, v, layout, window, None, torch.bfloat16)
        assert out.dtype == torch.bfloat16
        for gradient in torch.autograd.grad(out, operands, torch.randn_like(out)):
            assert gradient.dtype == torch.float32
        # A sum of two numbers in bfloat16 needs more digits than bfloat16 has.
        assert not torch.equal(gradient, gradient.bfloat16().float())


# Where it is used


def scorer_on(machine: PretendedCuda, family: str = "llama", autocast: Any = torch.bfloat16) -> TokenScorer:
    return TokenScorer(make_model(family).to("cuda"), autocast_dtype=autocast)


@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu_in_16_bits_auto_uses_it(family: str) -> None:
    with PretendedCuda() as machine, warnings.catch_warnings():
        warnings.simplefilter("error")
        scorer = scorer_on(machine, family)
        choose_attention(scorer, PrefixAttention.auto, longest=64)
        assert scorer.varlen
        choose_attention(dense := scorer_on(machine, family), PrefixAttention.dense)
        assert not dense.varlen


@pytest.mark.parametrize(
    ("gpu", "autocast", "reason"),
    [
        (None, torch.bfloat16, "it needs a GPU"),
        ((9, 0), None, "it computes in 16 bits, and the model in float32"),
        ((7, 5), torch.float16, "the GPU has compute capability 7.5, and it needs 8.0"),
    ],
)
def test_elsewhere_auto_uses_masks_and_says_nothing(
    gpu: tuple[int, int] | None, autocast: torch.dtype | None, reason: str
) -> None:
    with nullcontext() if gpu is None else PretendedCuda(capability=gpu), warnings.catch_warnings():
        warnings.simplefilter("error")
        scorer = TokenScorer(make_model().to("cpu" if gpu is None else "cuda"), autocast_dtype=autocast)
        choose_attention(scorer, PrefixAttention.auto)
        assert not scorer.varlen
        with pytest.raises(ModelError, match=rf"=varlen cannot be used \({reason}\); write .*=auto"):
            choose_attention(scorer, PrefixAttention.varlen)


def test_a_model_without_shared_prompts_is_refused_if_it_is_asked_for() -> None:
    with pytest.warns(UserWarning, match="attn_logit_softcapping") as warned:
        scorer = TokenScorer(make_model("gemma2"))
        choose_attention(scorer, PrefixAttention.auto)
    assert len(warned) == 1 and not scorer.varlen
    with pytest.raises(ModelError, match="prompts are run once per response"):
        choose_attention(scorer, PrefixAttention.varlen)


def test_heads_that_the_kernel_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, settings, _ = families.FAMILIES["deepseek-v3"]
    with PretendedCuda():
        scorer = TokenScorer(families.build(kind, settings).to("cuda"), autocast_dtype=torch.bfloat16)
        with pytest.warns(UserWarning, match="uses masks, because heads of .* do not fit"):
            choose_attention(scorer, PrefixAttention.auto)
        assert not scorer.varlen
        with pytest.raises(ModelError, match="do not fit"):
            choose_attention(scorer, PrefixAttention.varlen)


@pytest.mark.parametrize("fault", ["results", "gradients", "window", "scale"])
def test_a_kernel_with_wrong_numbers_is_not_used(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(kernel: Any, at: int) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            if fault == "window" and at == 0:
                kwargs["window_size_left"] = -1
            if fault == "scale" and kwargs["scale"] is not None:
                kwargs["scale"] = None
            results = list(kernel(*args, **kwargs))
            if (fault, at) in (("results", 0), ("gradients", 1)):
                results[at] = 1.05 * results[at]
            return tuple(results)

        return run

    with PretendedCuda():
        # Granite has a scale of its own.
        scorer = TokenScorer(
            families.build(*families.FAMILIES["granite"][:2]).to("cuda"), autocast_dtype=torch.bfloat16
        )
        monkeypatch.setattr(varlen, "_forward", faulty(varlen._forward, 0))
        monkeypatch.setattr(varlen, "_backward", faulty(varlen._backward, 1))
        says = "log-probabilities would change" if fault == "scale" else "its results are off by"
        with pytest.warns(UserWarning, match=f"because {says}"):
            choose_attention(scorer, PrefixAttention.auto)
    assert not scorer.varlen


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("window", [None, 70])
def test_the_trial_measures_rounding(window: int | None) -> None:
    model = make_model("qwen3")
    assert varlen_choice.kernel_error(model, torch.float64, window) < 1e-9
    assert 1e-3 < varlen_choice.kernel_error(model, torch.bfloat16, window) < 4e-3
