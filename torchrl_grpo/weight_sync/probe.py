"""Inputs of weight verification: the published weights, a perturbation of them, and probe prompts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from torchrl_grpo.models import lora
from torchrl_grpo.models.quantization import is_quantized

# Relative change of the matrices by test adapters: large enough to move log-probabilities clearly.
_PERTURBATION = 0.25


class NextTokenScorer(Protocol):
    """Computes the trainer's own log-probabilities of the next token for a probe."""

    def next_token_log_probs(
        self, prompt: Tensor, prompt_mask: Tensor, files: Sequence[Sequence[bytes]] | None = None
    ) -> Tensor:
        """See :meth:`~torchrl_grpo.models.scoring.token_scorer.TokenScorer.next_token_log_probs`."""


class ShardedWeights(Protocol):
    """A model in shards on several ranks, seen from rank 0 as if it were whole."""

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Names and whole parameters, one at a time."""

    def scale_columns(self, factor: float) -> None:
        """Multiply every eighth column of every parameter, on every rank."""


def named_weights(model: nn.Module | ShardedWeights) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors to publish: the parameters, tied ones once, detached but not copied.

    With adapters, each matrix comes with its adapter merged: see :func:`lora.merged_weights`.
    """
    return lora.merged_weights(model) if isinstance(model, nn.Module) else model.named_parameters()


@contextmanager
def perturbed(model: nn.Module | ShardedWeights, unchanged: Collection[nn.Parameter] = ()) -> Iterator[None]:
    """Halve every eighth column of every parameter that is not quantized, and double it again on exit.

    Powers of two change only the exponent, so the weights come back bit for bit without a copy of them. Small
    numbers of float16 lose a bit when they are halved, so float16 columns are copied. bfloat16 and float32
    lose a bit only in values below 1e-38, which are too small to change an output. Only some columns are
    scaled, so that no normalization layer cancels the change.

    Adapters are perturbed first. A new adapter's second matrix is zero, so scaling it has no effect, and
    quantized matrices change only through their adapters.

    Args:
        model: model that is changed in place.
        unchanged: parameters of it that stay as they are.
    """
    same = {id(parameter) for parameter in unchanged}

    def scale(factor: float) -> None:
        if not isinstance(model, nn.Module):
            model.scale_columns(factor)
            return
        with torch.no_grad():
            for parameter in model.parameters():
                if not is_quantized(parameter) and id(parameter) not in same:
                    parameter[..., ::8] *= factor

    float16_parameters = (
        [p for p in model.parameters() if p.dtype == torch.float16 and id(p) not in same]
        if isinstance(model, nn.Module)
        else []
    )
    with (
        lora.perturbed_adapters(model, _PERTURBATION, same) if isinstance(model, nn.Module) else nullcontext()
    ):
        kept = [parameter.detach()[..., ::8].clone() for parameter in float16_parameters]
        scale(0.5)
        try:
            yield
        finally:
            scale(2.0)
            for parameter, columns in zip(float16_parameters, kept, strict=True):
                parameter.detach()[..., ::8] = columns


def probe_length(block_size: int | None, max_model_len: int) -> int:
    """Number of tokens of a probe prompt: more than a block of the prefix cache, if the engine takes so many.

    Whether a stale cache is used shows only in full blocks.

    Args:
        block_size: tokens of a block; None for the engine's default, 32 on a CPU and 16 on a GPU.
        max_model_len: largest number of tokens of a prompt and its response.
    """
    return min(max(40, (block_size or 0) + 8), max_model_len - 1)


def probe_prompts(prompts: Sequence[Sequence[int]], count: int = 3, length: int = 40) -> list[list[int]]:
    """Token sequences for the probe, cut from real prompts so that none begins like another.

    Args:
        prompts: at least one tokenized prompt.
        count: sequences wanted.
        length: tokens of each, see :func:`probe_length`.
    """
    stream = [token for prompt in prompts for token in prompt]
    # All real prompts begin with the same system text, so they would share a prefix. Probes are cut out of
    # the joined prompts at different positions instead.
    starts = [1 + index * (len(stream) // count + 1) for index in range(count)]
    doubled = stream * (2 + (length + max(starts)) // len(stream))
    return [doubled[start : start + length] for start in starts]
