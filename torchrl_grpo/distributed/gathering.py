"""Which weights FSDP2 may gather in 16 bits: those that autocast would cast in any case, before it uses them.

That is the matrices of linear layers. Norms, embeddings, the output head (which the loss computes in a way of
its own) and whatever else a layer has come in float32, so that a model in shards computes what it computes on
one rank, to the last bit. A layer with weights whose use is not known here (experts, convolutions, factors of
its own) comes in float32 as a whole. No list of names tells what models do with their weights, so the result
is tried before the model is divided.
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

# Autocast casts all that these compute with. A subclass may do more than multiply.
_PRODUCTS = (nn.Linear, Conv1D)
# What a model raises that does not take weights in another format; the warning repeats it.
_REFUSALS = (TypeError, ValueError, AttributeError, LookupError, RuntimeError)


@dataclass(frozen=True)
class Layer:
    """A decoder layer, which is gathered while it runs.

    Attributes:
        module: the layer.
        norms: of its modules those that are gathered in float32, each by itself; none in a layer of which all
            is gathered in float32.
        in_16_bits: the rest is gathered in autocast's format.
    """

    module: nn.Module
    norms: tuple[nn.Module, ...]
    in_16_bits: bool


def layers_of(scorer: TokenScorer, device: torch.device) -> list[Layer]:
    """How the layers of the model are gathered, the same on every rank.

    Warns where more travels in float32 than norms, as that takes more memory.

    Args:
        scorer: around the model, which is not yet divided.
        device: of this rank, with which the ranks agree.
    """
    names = scorer.model._no_split_modules or []
    modules = [module for module in scorer.model.modules() if type(module).__name__ in names]
    plain = [Layer(module, (), False) for module in modules]
    if scorer.autocast_dtype is None:
        return plain
    found = [_divided(module) for module in modules]
    why = "" if all(layer.in_16_bits for layer in found) else "they have more than linear layers and norms"
    if any(layer.in_16_bits for layer in found):
        wrong = changes(scorer, found)
        if not _everywhere(wrong is None, device):
            found, why = plain, wrong or "another training rank could not use them in 16 bits"
    if why and (not dist.is_initialized() or dist.get_rank() == 0):
        half = str(scorer.autocast_dtype).removeprefix("torch.")
        weights = [p for one in found if not one.in_16_bits for p in one.module.parameters()]
        gib = 2 * sum(parameter.numel() for parameter in weights) / 2**30
        warnings.warn(
            f"train_model.parallelism=fsdp2: {sum(not one.in_16_bits for one in found)} of {len(found)} "
            f"layers of {type(scorer.model).__name__} are gathered in float32 instead of {half} ({why}); it "
            f"takes up to {gib:.2g} GiB more on each rank, for copies that autocast keeps",
            stacklevel=3,
        )
    return found


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
    """Why log-probabilities would not be those of plain autocast, tried on a few tokens; None if they are.

    Args:
        scorer: around the whole model.
        layers: how its layers would be gathered.
    """
    assert scorer.autocast_dtype is not None
    tokens = trial.batch(scorer.model)
    devices = [scorer.model.device] if scorer.model.device.type == "cuda" else []
    found = []
    with torch.no_grad(), _uncompiled(layers):
        for given in ([], layers):
            with torch.random.fork_rng(devices=devices), as_gathered(given, scorer.autocast_dtype):
                # Noise, if there is any, is the same in both.
                torch.manual_seed(0)
                try:
                    found.append(scorer(*tokens).log_probs)
                except _REFUSALS as error:
                    if not given or ran_out_of_memory(error):
                        raise
                    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    if torch.equal(*found):
        return None
    return f"log-probabilities would change by {float((found[0] - found[1]).abs().max()):.2g}"


@contextmanager
def as_gathered(layers: list[Layer], dtype: torch.dtype) -> Iterator[None]:
    """Give modules their weights as FSDP2 would, without other ranks; one layer at a time, so none is copied.

    Outside the module that a weight is gathered for there are no numbers, as there is only a shard.

    Args:
        layers: those gathered in 16 bits are concerned.
        dtype: of 16 bits.
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
    """Run layers as they are: what is compiled would be compiled again for every change."""
    compiled = [layer.module._compiled_call_impl for layer in layers]
    try:
        for layer in layers:
            layer.module._compiled_call_impl = None
        yield
    finally:
        for layer, call in zip(layers, compiled, strict=True):
            layer.module._compiled_call_impl = call


def _everywhere(value: bool, device: torch.device) -> bool:
    """Whether it is so on every rank."""
    if not dist.is_initialized():
        return value
    box = torch.tensor([int(value)], device=device)
    dist.all_reduce(box, dist.ReduceOp.MIN)
    return bool(box.item())
