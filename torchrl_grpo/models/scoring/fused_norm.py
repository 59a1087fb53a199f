"""RMS norms in fewer passes over memory: PyTorch's fused kernel on GPUs, blocks on a CPU under autocast.

Transformers computes an RMS norm (arXiv 1910.07467) in six operations, and about ten more are in the backward
pass. On a GPU each of them is a kernel, and the fused kernels are one and two. On a CPU each of them reads
all states from memory. Here a block of states stays in the cache for all operations. Without autocast, a CPU
computes norms as transformers does. Results agree up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Largest difference of two ways to compute a norm in float32, whose results are about 1.
_TOLERANCE = 1e-4
# States of the trial.
_TRIED = 16
# Numbers of a block on a CPU: 512 KiB, of which a core's cache holds three.
_BLOCK_ELEMENTS = 2**17


@torch.no_grad()
def fuse_norms(model: nn.Module) -> int:
    """Make the RMS norms of ``model`` use fewer passes, in place.

    A norm that computes something else, such as one that adds 1 to its weights, stays as it is.

    Returns:
        The number of norms that were changed.
    """
    fused = 0
    for module in model.modules():
        weight = module.__dict__.get("_parameters", {}).get("weight")
        is_norm = type(module).__name__.endswith("RMSNorm") and weight is not None and weight.dim() == 1
        if not is_norm or _epsilon(module) is None or not (weight.is_cuda or weight.dtype == torch.float32):
            continue
        states = torch.randn(_TRIED, len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
        norm = _kernel if weight.is_cuda else _in_blocks
        difference = module(states).float() - norm(module, states).float()
        if float(difference.abs().max()) <= _TOLERANCE * (1 + float(weight.abs().max())):
            kind: Any = type(module)
            module.__class__ = _with_fewer_passes(kind)
            fused += 1
    return fused


def _epsilon(module: nn.Module) -> float | None:
    values = [vars(module)[name] for name in ("variance_epsilon", "eps") if name in vars(module)]
    return float(values[0]) if values and isinstance(values[0], float) else None


@cache
def _with_fewer_passes(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of norms ``kind`` with another forward pass.

    A function in each norm would be another one in each layer, and a compiler would compile every layer anew.
    """

    def forward(module: nn.Module, states: Tensor) -> Tensor:
        if states.is_cuda:
            return _kernel(module, states)
        # A compiler fuses the operations itself.
        plain = states.dtype != torch.float32 or torch.compiler.is_compiling()
        if plain or not torch.is_autocast_enabled("cpu"):
            own: Tensor = kind.forward(module, states)
            return own
        return _in_blocks(module, states)

    return type(kind.__name__, (kind,), {"forward": forward})


def _kernel(module: nn.Module, states: Tensor) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return F.rms_norm(states, weight.shape, weight, _epsilon(module))


def _in_blocks(module: nn.Module, states: Tensor) -> Tensor:
    result: Tensor = _BlockedNorm.apply(states, module.weight, _epsilon(module))  # type: ignore[no-untyped-call]
    return result


class _BlockedNorm(torch.autograd.Function):
    """``y = w * n`` with ``n = x r`` and ``r = (mean(x^2) + eps)^(-1/2)``, for states ``x`` ``[..., H]``.

    With the incoming gradient ``g``, the gradients are ``sum(g n)`` of the weight, over all states, and
    ``r (g w - n mean(g w n))`` of the states.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = states.reshape(-1, len(weight))
        result, factors = rows.new_empty(rows.shape), rows.new_empty(len(rows))
        # As products with vectors, means take one operation, and no number is copied into a tensor each time.
        shares, least = rows.new_full((len(weight),), 1 / len(weight)), rows.new_full((1,), eps)
        for part in _blocks(rows):
            torch.addmv(least, rows[part] * rows[part], shares, out=factors[part]).rsqrt_()
            torch.mul(rows[part], factors[part, None], out=result[part]).mul_(weight)
        ctx.save_for_backward(states, weight, factors)
        return result.view(states.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, factors = ctx.saved_tensors
        rows, incoming = (x.reshape(-1, len(weight)) for x in (states, gradients[0]))
        by_rows, by_weight = rows.new_empty(rows.shape), rows.new_zeros(len(weight))
        # A number that is no tensor would be copied into one.
        shares = weight.to(rows.dtype) / rows.new_full((1,), -len(weight))
        for part in _blocks(rows):
            normal = rows[part] * factors[part, None]
            by_product = incoming[part] * normal
            by_weight += by_product.sum(0)
            torch.mul(incoming[part], weight, out=by_rows[part])
            by_rows[part].addcmul_(normal, torch.mv(by_product, shares)[:, None]).mul_(factors[part, None])
        return by_rows.view(states.shape), by_weight, None


def _blocks(rows: Tensor) -> Iterator[slice]:
    size = max(1, _BLOCK_ELEMENTS // rows.shape[1])
    yield from (slice(start, start + size) for start in range(0, len(rows), size))
