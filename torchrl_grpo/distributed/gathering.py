"""Selects the weights that FSDP2 gathers in 16 bits.

These are the weights that autocast casts before use in any case: the matrices of linear layers. All other
weights are gathered in float32, such as norms, embeddings and the output head, which the loss applies by
itself. A sharded model therefore computes the same as on one rank, to the last bit.

A layer may have weights whose use this module does not know: experts, convolutions, or parameters of the
layer itself. Such a layer is gathered in float32 as a whole. No list of names says what models do with their
weights, so this module tests the selection on a few tokens before the model is sharded.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from torchrl_grpo.models.scoring import trial
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.runtime.oom import ran_out_of_memory

# Autocast casts all weights of these types. Subclasses do not count, because they may do more than multiply.
_PRODUCTS = (nn.Linear, Conv1D)
# Errors of a model that does not accept weights in another format. The warning quotes them.
_REFUSALS = (TypeError, ValueError, AttributeError, LookupError, RuntimeError)


@dataclass(frozen=True)
class Layer:
    """A decoder layer, whose weights are gathered while it runs.

    Attributes:
        module: layer.
        norms: modules of the layer that are gathered in float32, each by itself; empty if the whole layer is
            gathered in float32.
        in_16_bits: whether the rest of the layer is gathered in autocast's format.
    """

    module: nn.Module
    norms: tuple[nn.Module, ...]
    in_16_bits: bool


def layers_of(scorer: TokenScorer, device: torch.device) -> list[Layer]:
    """Decide how each layer of the model is gathered, with the same result on every rank.

    Warn if some layers are gathered in float32 as a whole, because this takes more memory.

    Args:
        scorer: scorer of the model, which is not yet sharded.
        device: device of this rank, which the exchange with the other ranks uses.
    """
    names = scorer.model._no_split_modules or []
    modules = [module for module in scorer.model.modules() if type(module).__name__ in names]
    plain = [Layer(module, (), False) for module in modules]
    if scorer.autocast_dtype is None:
        return plain
    layers = [_divided(module) for module in modules]
    why = "" if all(layer.in_16_bits for layer in layers) else "they have more than linear layers and norms"
    if any(layer.in_16_bits for layer in layers):
        wrong = changes(scorer, layers)
        if not _everywhere(wrong is None, device):
            layers, why = plain, wrong or "another training rank could not use them in 16 bits"
    if why and (not dist.is_initialized() or dist.get_rank() == 0):
        half = str(scorer.autocast_dtype).removeprefix("torch.")
        weights = [p for layer in layers if not layer.in_16_bits for p in layer.module.parameters()]
        gib = 2 * sum(parameter.numel() for parameter in weights) / 2**30
        warnings.warn(
            f"train_model.parallelism=fsdp2: {sum(not layer.in_16_bits for layer in layers)} of {len(layers)}"
            f" layers of {type(scorer.model).__name__} are gathered in float32 instead of {half} ({why}); it "
            f"takes up to {gib:.2g} GiB more on each rank, for copies that autocast keeps",
            stacklevel=3,
        )
    return layers


def _divided(layer: nn.Module) -> Layer:
    norms = []
    for module in layer.modules():
        own = list(module.parameters(recurse=False))
        if not own or type(module) in _PRODUCTS:
            continue
        if module is layer or any(True for _ in module.children()) or any(p.ndim > 1 for p in own):
            return Layer(layer, (), False)
        norms.append(module)
    return Layer(layer, tuple(norms), True)


def changes(scorer: TokenScorer, layers: list[Layer]) -> str | None:
    """Compare the log-probabilities of a few tokens with and without gathering in 16 bits.

    Args:
        scorer: scorer of the whole model.
        layers: layers, and how they would be gathered.

    Returns:
        The reason why the log-probabilities would change; None if they are equal.
    """
    assert scorer.autocast_dtype is not None
    tokens = trial.batch(scorer.model)
    devices = [scorer.model.device] if scorer.model.device.type == "cuda" else []
    log_probs = []
    with torch.no_grad(), _uncompiled(layers):
        for gathered_layers in ([], layers):
            with torch.random.fork_rng(devices=devices), as_gathered(gathered_layers, scorer.autocast_dtype):
                # With one seed, a model that draws random numbers draws the same ones both times.
                torch.manual_seed(0)
                try:
                    log_probs.append(scorer(*tokens).log_probs)
                except _REFUSALS as error:
                    if not gathered_layers or ran_out_of_memory(error):
                        raise
                    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    if torch.equal(*log_probs):
        return None
    return f"log-probabilities would change by {float((log_probs[0] - log_probs[1]).abs().max()):.2g}"


@contextmanager
def as_gathered(layers: list[Layer], dtype: torch.dtype) -> Iterator[None]:
    """Emulate FSDP2's gathering on one rank, for one layer at a time, so that the model is never copied.

    A weight is NaN while its module does not run, because under FSDP2 only a shard exists then.

    Args:
        layers: layers of the model. Only those gathered in 16 bits are changed.
        dtype: number format with 16 bits.
    """
    hooks: list[Any] = []
    kept: dict[nn.Parameter, Tensor] = {}

    def lend(module: nn.Module, parameters: list[nn.Parameter], to: torch.dtype) -> None:
        def gather(*_: Any) -> None:
            for parameter in parameters:
                parameter.data = kept[parameter].to(to)

        def drop(*_: Any) -> None:
            for parameter in parameters:
                parameter.data = torch.full_like(kept[parameter][..., :1], torch.nan).expand_as(
                    kept[parameter]
                )

        kept.update((parameter, parameter.data) for parameter in parameters)
        drop()
        hooks.append(module.register_forward_pre_hook(gather, prepend=True))
        hooks.append(module.register_forward_hook(drop))

    try:
        for layer in layers:
            if not layer.in_16_bits:
                continue
            exact = {parameter for norm in layer.norms for parameter in norm.parameters()}
            lend(layer.module, [p for p in layer.module.parameters() if p not in exact], dtype)
            for norm in layer.norms:
                lend(norm, list(norm.parameters()), torch.float32)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, values in kept.items():
            parameter.data = values


@contextmanager
def _uncompiled(layers: list[Layer]) -> Iterator[None]:
    """Run layers uncompiled, because compiled layers would be recompiled after every change of weights."""
    compiled = [layer.module._compiled_call_impl for layer in layers]
    try:
        for layer in layers:
            layer.module._compiled_call_impl = None
        yield
    finally:
        for layer, call in zip(layers, compiled, strict=True):
            layer.module._compiled_call_impl = call


def _everywhere(value: bool, device: torch.device) -> bool:
    """Return whether ``value`` is true on every rank."""
    if not dist.is_initialized():
        return value
    box = torch.tensor([int(value)], device=device)
    dist.all_reduce(box, dist.ReduceOp.MIN)
    return bool(box.item())
