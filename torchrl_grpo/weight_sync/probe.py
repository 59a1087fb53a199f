"""What a publication is tried on: the weights that are published, a perturbation of them, probe prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from torchrl_grpo.models import lora
from torchrl_grpo.models.quantization import is_quantized
from torchrl_grpo.weight_sync.source import ShardedWeights

# What test adapters change their matrices by, as a share: the engine then answers far from where it did.
_STIR = 0.25


def named_weights(model: nn.Module | ShardedWeights) -> Iterator[tuple[str, Tensor]]:
    """What is published, by name: the parameters, tied ones once, detached but not copied.

    Of a model with adapters each matrix with its adapter merged in: see :func:`lora.merged_weights`.
    """
    return lora.merged_weights(model) if isinstance(model, nn.Module) else model.named_parameters()


@contextmanager
def perturbed(model: nn.Module | ShardedWeights) -> Iterator[None]:
    """Halve every eighth column of every parameter, and double it again on the way out.

    Powers of two change only the exponent, so the weights come back bit for bit without a copy of them. Small
    numbers of float16 lose a bit when they are halved: there the columns are copied. Numbers of the other
    formats do so below 1e-38, which is nothing to a product. Only some
    columns, so that no normalization layer cancels the change. Adapters, which change nothing at their
    beginning, are stirred first.
    """

    def scale(factor: float) -> None:
        if not isinstance(model, nn.Module):
            model.scale_columns(factor)
            return
        with torch.no_grad():
            for parameter in model.parameters():
                if not is_quantized(parameter):  # moved by its adapter
                    parameter[..., ::8] *= factor

    halves = (
        [p for p in model.parameters() if p.dtype == torch.float16] if isinstance(model, nn.Module) else []
    )
    with lora.stirred(model, _STIR) if isinstance(model, nn.Module) else nullcontext():
        kept = [parameter.detach()[..., ::8].clone() for parameter in halves]
        scale(0.5)
        try:
            yield
        finally:
            scale(2.0)
            for parameter, columns in zip(halves, kept, strict=True):
                parameter.detach()[..., ::8] = columns


def probe_prompts(prompts: Sequence[Sequence[int]], count: int = 3, length: int = 40) -> list[list[int]]:
    """Token sequences for the probe, cut from real prompts so that none begins like another.

    Args:
        prompts: at least one tokenized prompt.
        count: sequences wanted.
        length: tokens of each; more than one cache block (32 tokens on a CPU, 16 on a GPU).
    """
    stream = [token for prompt in prompts for token in prompt]
    # Real prompts all begin with the same system text; a different rotation of the stream does not.
    starts = [1 + index * (len(stream) // count + 1) for index in range(count)]
    doubled = stream * (2 + (length + max(starts)) // len(stream))
    return [doubled[start : start + length] for start in starts]
