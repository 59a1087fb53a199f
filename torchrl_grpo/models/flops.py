"""Useful operations of a training pass, and how fast this machine multiplies matrices.

Useful is what the mathematics needs: a group's prompt once, no padding, nothing computed twice. Their rate
over the machine's own rate for a plain matrix product says how far training is from its limit. Left out:
mixtures of experts, of which every expert would be counted, and anything that is not a matrix product.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

# Operations of one product: enough for full speed, few enough for a measurement within a second.
_OPERATIONS = {"cpu": 10**10, "cuda": 10**12}
# And no more rows than fit beside an engine that has taken its share of a GPU.
_ROWS = 16_384
_REPEATS = 7
_SECONDS = 0.5


class FlopCounter:
    """Counts multiplications and additions, each one operation.

    A product of ``[N, K]`` and ``[K, M]`` is ``2 N K M``; the backward pass has it once more for the input
    and once more for the weight, where that is trained. Attention has two products of ``head_dim`` per head
    and pair of tokens that see each other.

    Args:
        model: a dense causal language model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        head = model.get_output_embeddings()
        # Of a model that also takes images or sound: the part that text goes through.
        body = model.get_decoder()
        layers = [m for m in body.modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]
        self._body = sum(_size(layer) for layer in layers)
        self._body_trained = sum(_size(layer) for layer in layers if layer.weight.requires_grad)
        self._head = _size(head)
        self._head_trained = self._head if head.weight.requires_grad else 0
        settings = config.to_dict()
        # Layers without attention have none of it to count.
        heads = config.num_attention_heads if hasattr(config, "num_attention_heads") else 0
        head_dim = settings.get("head_dim") or config.hidden_size // max(1, heads)
        kinds = settings.get("layer_types") or ["full_attention"] * config.num_hidden_layers
        if settings.get("layer_types") is None and settings.get("sliding_window") is not None:
            kinds = ["sliding_attention"] * config.num_hidden_layers
        windows = {"full_attention": None, "sliding_attention": settings.get("sliding_window")}
        self._layers = Counter(windows[kind] for kind in kinds if kind in windows)
        self._per_pair = 4 * heads * head_dim

    def __call__(
        self, prompts: Sequence[int], responses: Sequence[Sequence[int]], *, backward: bool
    ) -> float:
        """Operations for groups of ``prompts`` tokens each and the tokens of their ``responses``.

        Args:
            prompts: P lengths.
            responses: P lists of G lengths; 0 is no response.
            backward: count the backward pass too.
        """
        inputs = scored = 0
        attention = 0
        for prompt, group in zip(prompts, responses, strict=True):
            inputs += prompt
            attention += self._attention(0, prompt)
            for length in group:
                # A response's last token is only predicted.
                steps = max(0, length - 1)
                inputs += steps
                scored += length
                attention += self._attention(prompt, steps)
        forward = 2 * (self._body * inputs + self._head * scored) + attention
        if not backward:
            return float(forward)
        by_weight = 2 * (self._body_trained * inputs + self._head_trained * scored) + attention
        return float(2 * forward + by_weight)

    def _attention(self, before: int, tokens: int) -> int:
        """Operations of ``tokens`` that follow ``before`` others, in all layers."""
        total = 0
        for window, layers in self._layers.items():
            pairs = tokens * before + tokens * (tokens + 1) // 2
            if window is not None:
                # Token i (from 1) sees min(before + i, window) others and itself.
                beyond = range(max(1, window - before + 1), tokens + 1)
                pairs -= sum(before + i - window for i in beyond)
            total += self._per_pair * layers * pairs
        return total


def _size(layer: nn.Linear | Conv1D) -> int:
    # Of a quantized layer the weight is a list of bytes, and of one in DeepSpeed's shards it is empty.
    return layer.in_features * layer.out_features if isinstance(layer, nn.Linear) else layer.nx * layer.nf


def gemm_rate(device: torch.device, dtype: torch.dtype, width: int) -> float:
    """Operations a second of a plain product ``[rows, width] x [width, 4 width]`` into memory at hand.

    The fastest of a few: a shared machine is slower at times, never faster.

    Args:
        device: where.
        dtype: of the operands.
        width: the model's hidden size.
    """
    rows = min(_ROWS, max(64, _OPERATIONS.get(device.type, _OPERATIONS["cuda"]) // (8 * width**2)))
    generator = torch.Generator(device).manual_seed(0)
    left = torch.randn(rows, width, device=device, generator=generator).to(dtype)
    right = torch.randn(width, 4 * width, device=device, generator=generator).to(dtype)
    out = torch.empty(rows, 4 * width, device=device, dtype=dtype)
    seconds: list[float] = []
    while len(seconds) < _REPEATS and sum(seconds) < _SECONDS:
        _wait(device)
        started = time.perf_counter()
        torch.mm(left, right, out=out)
        _wait(device)
        seconds.append(time.perf_counter() - started)
    if device.type == "cuda":
        del left, right, out
        torch.cuda.empty_cache()
    return 8 * rows * width**2 / min(seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
