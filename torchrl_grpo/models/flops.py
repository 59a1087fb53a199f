"""Count the useful FLOPs of a training pass, and measure the FLOP rate of this machine.

Useful FLOPs are those that the mathematics needs: each prompt once per group, no padding, and no
recomputation. Their rate divided by the machine's rate for a plain matrix product shows how close training is
to the limit. Only matrix products count. For mixtures of experts the count is too high, because it includes
every expert.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

# FLOPs of one product: enough for full speed, and few enough for a measurement within a second.
_OPERATIONS = {"cpu": 10**10, "cuda": 10**12}
# Limit of rows, so that the product fits beside an engine that occupies most of a GPU.
_ROWS = 16_384
_REPEATS = 7
_SECONDS = 0.5


class FlopCounter:
    """Counts FLOPs. Each multiplication and each addition is one FLOP.

    A product of ``[N, K]`` and ``[K, M]`` has ``2 N K M``. The backward pass has as many again for the input,
    and as many again for the weight if it is trained. Attention has two products of length ``head_dim`` per
    head and pair of query and visible key.

    Args:
        model: a dense causal language model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        head = model.get_output_embeddings()
        # The text decoder, for a model that also takes images or audio.
        body = model.get_decoder()
        layers = [m for m in body.modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]
        self._body = sum(_size(layer) for layer in layers)
        self._body_trained = sum(_size(layer) for layer in layers if layer.weight.requires_grad)
        self._head = _size(head)
        self._head_trained = self._head if head.weight.requires_grad else 0
        settings = config.to_dict()
        # Models without attention have no heads.
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
        """Count the FLOPs of a pass over P groups.

        Args:
            prompts: lengths of the P prompts in tokens.
            responses: P lists of the lengths of G responses in tokens; 0 means no response.
            backward: whether to include the backward pass.
        """
        inputs = scored = 0
        attention = 0
        for prompt, group in zip(prompts, responses, strict=True):
            inputs += prompt
            attention += self._attention(0, prompt)
            for length in group:
                # The last token of a response is a target, but not an input.
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
        """Count the FLOPs of the attention of ``tokens`` that follow ``before`` others, in all layers."""
        total = 0
        for window, layers in self._layers.items():
            pairs = tokens * before + tokens * (tokens + 1) // 2
            if window is not None:
                # Token i (from 1) sees min(before + i, window) tokens, including itself.
                beyond = range(max(1, window - before + 1), tokens + 1)
                pairs -= sum(before + i - window for i in beyond)
            total += self._per_pair * layers * pairs
        return total


def _size(layer: nn.Linear | Conv1D) -> int:
    # Not weight.numel(): a quantized layer's weight is packed bytes, and DeepSpeed's sharded weights are
    # empty.
    return layer.in_features * layer.out_features if isinstance(layer, nn.Linear) else layer.nx * layer.nf


def gemm_rate(device: torch.device, dtype: torch.dtype, width: int) -> float:
    """Measure the FLOP/s of a plain product ``[rows, width] x [width, 4 width]`` into a preallocated tensor.

    The result is the fastest of a few products, because load on a shared machine can only slow them down.

    Args:
        device: device of the product.
        dtype: dtype of the operands.
        width: hidden size of the model.

    Returns:
        FLOPs per second.
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
