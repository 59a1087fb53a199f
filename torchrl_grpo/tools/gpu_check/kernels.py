"""Stages that compute in a process of their own: what the machine is, and whether it computes correctly."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from torchrl_grpo.errors import TrainingStopped
from torchrl_grpo.models.precision import autocast, choose_kernels
from torchrl_grpo.models.scoring import varlen_choice
from torchrl_grpo.models.scoring.shared_prefix import PrefixLayout, hidden_states
from torchrl_grpo.models.scoring.token_scorer import TokenScorer, backbone
from torchrl_grpo.models.scoring.varlen import VarlenLayout
from torchrl_grpo.planning import speeds
from torchrl_grpo.runtime.package_versions import versions

Figures = dict[str, float | str]
# Largest difference of log-probabilities in nats, and of gradients as a share of the largest one, between two
# ways to compute in float32. Kernels sum in another order; TF32 would be a hundred times as far apart.
_FLOAT32_NATS, _FLOAT32_GRADIENT = 2e-4, 2e-3
# The same in bfloat16, which has 8 mantissa bits.
_BFLOAT16_NATS = 0.5
# Error of a kernel in bfloat16, as a share of the size of its results. Rounding alone gives 0.0025.
_KERNEL_ERROR = 0.02
# Errors of attention with and without masks, in bfloat16, may differ by this factor.
_ERRORS_RATIO = 2.0
# Tokens of a prompt and of the two responses whose attention is timed.
_TIMED_PROMPT, _TIMED_RESPONSES = 512, (1024, 4096, 16_384)


def environment(model: Path) -> Figures:
    """Read what the machine is, and measure its matrix products and, of a GPU, its memory."""
    choose_kernels()
    device = device_of_check()
    figures: Figures = {**versions("ray", "flash-attn", "bitsandbytes")}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        figures |= {
            "gpus": torch.cuda.device_count(),
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_gib": properties.total_memory / 2**30,
            "cuda": str(torch.version.cuda),
        }
    products = {dtype: _matrix_product(device, dtype) for dtype in (torch.float32, torch.bfloat16)}
    figures |= {f"{str(dtype).removeprefix('torch.')}_tflops": rate for dtype, rate in products.items()}
    if device.type == "cuda":
        figures["copy_tb_per_s"] = copied = _copy(device)
        keep_speeds(tflops=products[torch.bfloat16], tflops_float32=products[torch.float32], tb_per_s=copied)
    return figures


def keep_speeds(**measured: float) -> None:
    """Keep speeds of the first GPU for the plans of later runs."""
    try:
        speeds.write(torch.cuda.get_device_properties(device_of_check()).name, measured)
    except OSError as error:
        # The GPU is right also where nothing can be written, as in some containers.
        warnings.warn(
            f"{speeds.path()}: the measured speeds are not kept for later plans ({error.strerror})",
            stacklevel=2,
        )


def scores(model: Path) -> Figures:
    """Compare log-probabilities and gradients of the device with those of the CPU, and with each other."""
    choose_kernels()
    device = device_of_check()
    on_cpu = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    there = copy.deepcopy(on_cpu).to(device)
    batch = batch_of(on_cpu.config.vocab_size)
    exact = _scored(TokenScorer(on_cpu), batch)
    shared = _scored(TokenScorer(there), batch)
    plain = _scored(TokenScorer(there, shares_prefix=False), batch)
    half = _scored(TokenScorer(there, autocast_dtype=torch.bfloat16), batch)
    figures: Figures = {}
    for name, scored, other in (("to_cpu", shared, exact), ("shared_to_plain", shared, plain)):
        figures[f"{name}_nats"], figures[f"{name}_gradient"] = _apart(scored, other)
        _check(f"{name}_nats", float(figures[f"{name}_nats"]), _FLOAT32_NATS)
        _check(f"{name}_gradient", float(figures[f"{name}_gradient"]), _FLOAT32_GRADIENT)
    figures["bfloat16_nats"], figures["bfloat16_gradient"] = _apart(half, shared)
    _check("bfloat16_nats", float(figures["bfloat16_nats"]), _BFLOAT16_NATS)
    figures["shared_speedup"] = seconds(lambda: _scored(TokenScorer(there, shares_prefix=False), batch)) / (
        seconds(lambda: _scored(TokenScorer(there), batch))
    )
    return figures


def flash(model: Path) -> Figures:
    """Compare attention over shared prompts without masks with that with masks: numbers, gradients, time."""
    choose_kernels()
    there = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device_of_check())
    masked, varlen = (TokenScorer(there, autocast_dtype=torch.bfloat16) for _ in range(2))
    varlen.varlen = True
    if reason := varlen_choice.unsupported(varlen):
        return {"not_used": reason}
    figures: Figures = {}
    for name, window in (("kernel", None), ("kernel_window", 70)):
        figures[f"{name}_error"] = varlen_choice.kernel_error(there, torch.bfloat16, window)
        _check(f"{name}_error", float(figures[f"{name}_error"]), _KERNEL_ERROR)
    batch = batch_of(there.config.vocab_size)
    exact, with_masks, without = (_scored(scorer, batch) for scorer in (TokenScorer(there), masked, varlen))
    for name, bound, its in zip(
        ("nats", "gradient"), _apart(with_masks, exact), _apart(without, exact), strict=True
    ):
        figures[f"masks_{name}"], figures[f"varlen_{name}"] = bound, its
        _check(f"varlen_{name}", its, _ERRORS_RATIO * bound)
    there.config.num_hidden_layers = 1
    layer = AutoModelForCausalLM.from_config(there.config, dtype=torch.float32).to(device_of_check())
    # Prepares the layer for rows of groups.
    assert TokenScorer(layer).shares_prefix
    for tokens in _TIMED_RESPONSES:
        timed = [
            seconds(partial(_layer_pass, layer, tokens, without_masks)) for without_masks in (False, True)
        ]
        figures[f"times_as_fast_{tokens}"] = timed[0] / timed[1]
    return figures


def _layer_pass(model: PreTrainedModel, tokens: int, without_masks: bool) -> None:
    """Run a layer forward and backward over a prompt and two responses."""
    prompt = torch.ones(1, _TIMED_PROMPT, dtype=torch.int64)
    response = torch.ones(1, 2, tokens, dtype=torch.int64)
    layout: PrefixLayout | VarlenLayout
    if without_masks:
        layout = VarlenLayout(prompt, prompt.bool(), response, response.bool(), model.device)
    else:
        layout = PrefixLayout(prompt, prompt.bool(), response, response.bool(), model.device)
    with autocast(torch.bfloat16, model.device):
        hidden = hidden_states(backbone(model), layout)
    hidden.sum().backward()


def device_of_check() -> torch.device:
    """Return the first GPU, or the CPU."""
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def _matrix_product(device: torch.device, dtype: torch.dtype) -> float:
    """Return the speed of a square product in TFLOP/s."""
    size = 8192 if device.type == "cuda" else 1024
    matrix = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / seconds(lambda: matrix @ matrix) / 1e12


def _copy(device: torch.device) -> float:
    """Return the TB/s at which memory is copied, reads and writes together."""
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source)) / 1e12


def seconds(work: Callable[[], object]) -> float:
    """Return the duration of the second of two runs."""
    for _ in range(2):
        _finish()
        start = time.perf_counter()
        work()
        _finish()
    return time.perf_counter() - start


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def batch_of(vocabulary: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return prompts ``[4, 96]`` and responses ``[4, 8, 48]`` of several lengths, with their masks."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, vocabulary, (4, 96), generator=generator)
    response = torch.randint(3, vocabulary, (4, 8, 48), generator=generator)
    lengths = torch.randint(20, 97, (4, 1), generator=generator)
    ends = torch.randint(1, 49, (4, 8, 1), generator=generator)
    # Prompts are padded on the left, and responses on the right.
    return prompt, torch.arange(96).flip(0) < lengths, response, torch.arange(48) < ends


def _scored(
    scorer: TokenScorer, batch: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return log-probabilities and gradients of their mean, on the CPU."""
    model: nn.Module = scorer.model
    model.zero_grad()
    device = next(model.parameters()).device
    log_probs = scorer(*(part.to(device) for part in batch)).log_probs
    log_probs.mean().backward()
    gradients = {n: p.grad.float().cpu() for n, p in model.named_parameters() if p.grad is not None}
    return log_probs.detach().float().cpu(), gradients


def _apart(
    scored: tuple[Tensor, dict[str, Tensor]], other: tuple[Tensor, dict[str, Tensor]]
) -> tuple[float, float]:
    """Return the largest difference of log-probabilities, and of gradients as a share of the largest."""
    nats = float((scored[0] - other[0]).abs().max())
    largest = max(float(gradient.abs().max()) for gradient in other[1].values())
    return nats, max(float((scored[1][name] - g).abs().max()) for name, g in other[1].items()) / largest


def _check(name: str, value: float, bound: float) -> None:
    # The comparison is negated so that NaN fails too.
    if not value <= bound:
        raise TrainingStopped(f"{name} is {value:.3g}, and at most {bound:g} is rounding")
