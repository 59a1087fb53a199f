"""``train_model.compile``: the layers' own numbers, no batch compiled anew, and a fallback that is said."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from batches import compiler_backend, make_batch, make_model
from rounding import assert_rounds_alike, float64
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

from torchrl_grpo.config.schema import TrainModelConfig
from torchrl_grpo.models.prepare import compile_layers, prepare_for_training
from torchrl_grpo.models.scoring.token_scorer import TokenScorer

pytestmark = pytest.mark.slow

KEYS = (("tokens", "prompt"), ("masks", "prompt"), ("tokens", "response"), ("masks", "response"))


@pytest.fixture(autouse=True)
def _as_new() -> None:
    torch.compiler.reset()
    counters.clear()


def numbers(model: nn.Module, scorer: TokenScorer, seed: int) -> dict[str, Tensor]:
    """Log-probabilities and gradients on a batch whose sizes depend on the seed."""
    batch = make_batch(P=2 + seed, G=3, L=9 + seed, T=7 + 2 * seed, seed=seed)
    model.zero_grad()
    log_probs = scorer(*(batch[key] for key in KEYS)).log_probs
    (log_probs * batch["masks", "response"]).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"log-probabilities": log_probs.detach(), **gradients}


def exact_numbers(family: str, seed: int) -> dict[str, Tensor]:
    with float64():
        model = make_model(family)
        return numbers(model, TokenScorer(model), seed)


def compare(
    family: str, model: nn.Module, scorer: TokenScorer, compiled_for: TokenScorer | None = None
) -> None:
    expected = [numbers(model, scorer, seed) for seed in range(4)]
    compiled_without_a_word(model, compiled_for or scorer)
    graphs = []
    for seed in range(4):
        assert_rounds_alike(numbers(model, scorer, seed), expected[seed], exact_numbers(family, seed))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0 and graphs[-1] == graphs[0], "a batch of other sizes is compiled anew"


def compiled_without_a_word(model: nn.Module, scorer: TokenScorer) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="train_model.compile")
        compile_layers(model, scorer)
    assert sum(module._compiled_call_impl is not None for module in model.modules()) == 2


@pytest.mark.parametrize(("family", "checkpointing"), [("gpt2", False), ("gemma3", True)])
def test_compiled_layers_have_the_same_numbers(family: str, checkpointing: bool) -> None:
    model = make_model(family)
    prepare_for_training(model, TrainModelConfig(gradient_checkpointing=checkpointing))
    with compiler_backend("aot_eager"):
        compare(family, model, TokenScorer(model))


def test_what_the_compiler_writes_has_the_same_numbers_and_works_under_mixed_precision() -> None:
    model = make_model()
    prepare_for_training(model, TrainModelConfig())
    mixed = TokenScorer(model, autocast_dtype=torch.bfloat16)
    plain = numbers(model, mixed, 1)
    try:
        # torch would build and load three programs to find out whether the processor does what it says.
        with inductor.patch({"cpp.vec_isa_ok": True}):
            # What is compared first are the numbers without mixed precision.
            compare("llama", model, TokenScorer(model), compiled_for=mixed)
    except UserWarning as refusal:
        # For some processors torch writes code that is wrong or cannot be built. A run then does without it.
        assert "LlamaForCausalLM is not compiled" in str(refusal)
        assert all(torch.equal(after, plain[name]) for name, after in numbers(model, mixed, 1).items())
        return
    measured = numbers(model, mixed, 1)
    assert measured["log-probabilities"].dtype == torch.float32
    assert_rounds_alike(measured, plain, exact_numbers("llama", 1))


def test_memory_that_runs_out_is_no_fault_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without compiled layers, training would take more memory than was planned."""

    def run_out(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    model = make_model()
    monkeypatch.setattr(torch.autograd, "grad", run_out)
    with compiler_backend(lambda graph, inputs: graph), pytest.raises(torch.OutOfMemoryError):
        compile_layers(model, TokenScorer(model))


def test_the_trial_computes_backward_passes_but_keeps_no_gradient() -> None:
    graphs: list[bool] = []

    def note(graph: Any, inputs: Any) -> Any:
        graphs.append(any("mm" in str(node.target) for node in graph.graph.nodes))
        return graph

    model = make_model()
    with compiler_backend(aot_autograd(fw_compiler=lambda graph, inputs: graph, bw_compiler=note)):
        assert compile_layers(model, TokenScorer(model))
    assert any(graphs), "what fails in a backward pass must fail here"
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_compiler_that_fails_is_said_and_not_used() -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    model = make_model()
    scorer = TokenScorer(model)
    expected = numbers(model, scorer, 0)
    pattern = r"train_model\.compile=true: LlamaForCausalLM is not compiled .*no compiler"
    with compiler_backend(broken), pytest.warns(UserWarning, match=pattern):
        assert not compile_layers(model, scorer)
    measured = numbers(model, scorer, 0)
    assert all(torch.equal(measured[name], tensor) for name, tensor in expected.items())
