"""Log-probability and entropy under an output head, without storing the logits of the whole vocabulary.

The vocabulary is processed in blocks, with a running log-sum-exp. On a CPU a block fits in the cache. The
backward pass recomputes each block. Memory does not depend on the size of the vocabulary, and depends on the
number of tokens only through the hidden states. A fused kernel for some GPUs is in
:mod:`~torchrl_grpo.models.scoring.fused_head`.

On a GPU, products of 16-bit operands are float32: the kernel adds in float32, and nothing is rounded. Nothing
there depends on a number that would have to be read from the GPU.

Axes: ``N`` tokens, ``H`` hidden size, ``V`` size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

# On a CPU 16 MiB in float32, which fits in a small last-level cache. GPUs need larger products.
_BLOCK_ELEMENTS = {"cpu": 2**22, "cuda": 2**26}
# Logit of a token that cannot be sampled. It is finite, because 0 times infinity is NaN.
_IMPOSSIBLE = -1e30
# With fewer tokens in a product, a CPU spends more time reading the matrix than computing.
_MIN_TOKENS = 1024


class HeadOptions(NamedTuple):
    """Steps from ``hidden @ weight.T + bias`` to the final logits: scale, cap, temperature, in this order.

    Attributes:
        temperature: divisor of the logits.
        softcap: cap in ``softcap * tanh(logits / softcap)``, or None (Gemma 2, arXiv 2408.00118, sec. 2).
        dtype: dtype of the product's operands, also in the backward pass. On a CPU it is that of the result
            too. Everything after the product is float32.
        entropy_gradient: whether gradients flow through the entropy.
        scale: factor of the logits (Granite, Cohere).
        blocked: tokens that the engine never samples. Their probability is 0.
    """

    temperature: float = 1.0
    softcap: float | None = None
    dtype: torch.dtype = torch.float32
    entropy_gradient: bool = False
    scale: float = 1.0
    blocked: tuple[int, ...] = ()


def postprocess_logits(product: Tensor, options: HeadOptions) -> Tensor:
    """Return float32 logits at temperature 1 from ``hidden @ weight.T + bias``."""
    logits = product.float() * options.scale
    return logits if options.softcap is None else options.softcap * torch.tanh(logits / options.softcap)


def score_tokens(
    hidden: Tensor,
    targets: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    options: HeadOptions = HeadOptions(),  # noqa: B008 - immutable
    block_elements: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the log-probability of ``targets`` and the entropy of each distribution.

    A position may have several targets.

    With logits ``l``, ``p = softmax(l)`` and ``H = -sum p log p``, the gradients are
    ``d log p_y / d l_v = [v = y] - p_v`` and ``d H / d l_v = -p_v (log p_v + H)``.

    Args:
        hidden: ``[N, H]``.
        targets: ``[N]`` or ``[N, K]`` int64.
        weight: ``[V, H]``.
        bias: ``[V]`` or None.
        options: temperature, scale, cap and dtype.
        block_elements: number of logits in memory; None chooses by device.

    Returns:
        Log-probabilities of the shape of ``targets``, and entropies ``[N]``, in nats and float32.
    """
    size = block_elements or _BLOCK_ELEMENTS.get(hidden.device.type, _BLOCK_ELEMENTS["cuda"])
    columns = targets.unsqueeze(1) if targets.dim() == 1 else targets
    log_probs, entropy = _Score.apply(hidden, columns, weight, bias, options, size)  # type: ignore[no-untyped-call]
    return log_probs.view(targets.shape), entropy


@torch.no_grad()
def top_tokens(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: HeadOptions,
    count: int,
    block_elements: int | None = None,
) -> Tensor:
    """Find the most probable tokens of each position.

    Args:
        hidden: ``[N, H]``.
        weight: ``[V, H]``.
        bias: ``[V]`` or None.
        options: as for :func:`score_tokens`.
        count: number of tokens K, at most V.
        block_elements: number of logits in memory; None chooses by device.

    Returns:
        Token ids ``[N, K]``, the most probable first.
    """
    size = block_elements or _BLOCK_ELEMENTS.get(hidden.device.type, _BLOCK_ELEMENTS["cuda"])
    head = _Head(weight, bias, options, size)
    ids = [head.top(hidden[rows], count) for rows in head.row_pieces(len(hidden))]
    return torch.cat(ids) if ids else hidden.new_zeros(0, count, dtype=torch.int64)


def _is_in(token: int, words: slice) -> bool:
    return bool(words.start <= token < words.stop)


def _pieces(count: int, size: int) -> Iterator[slice]:
    yield from (slice(start, min(start + size, count)) for start in range(0, count, size))


class _Score(torch.autograd.Function):
    """:func:`score_tokens`. The backward pass needs hidden states, weights and two numbers per token."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: HeadOptions,
        block_elements: int,
    ) -> tuple[Tensor, Tensor]:
        head = _Head(weight, bias, options, block_elements)
        results = [head.score(hidden[rows], targets[rows]) for rows in head.row_pieces(len(hidden))]
        empty = hidden.new_zeros(0, dtype=torch.float32)
        log_probs, normalizer, entropy = (
            map(torch.cat, zip(*results, strict=True))
            if results
            else (hidden.new_zeros(targets.shape, dtype=torch.float32), empty, empty)
        )
        ctx.save_for_backward(hidden, targets, weight, bias, normalizer, entropy)
        ctx.options, ctx.block_elements = options, block_elements
        if not options.entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, targets, weight, bias, normalizer, entropy = ctx.saved_tensors
        by_log_prob = gradients[0]
        by_entropy = gradients[1] if ctx.options.entropy_gradient else None
        head = _Head(weight, bias, ctx.options, ctx.block_elements)
        wants_hidden, _, wants_weight, wants_bias, _, _ = ctx.needs_input_grad
        d_hidden = torch.zeros(hidden.shape, device=hidden.device) if wants_hidden else None
        # Float32 also for 16-bit weights, so that it is rounded once and not after every block of tokens.
        d_weight = torch.zeros(weight.shape, device=weight.device) if wants_weight else None
        d_bias = torch.zeros_like(bias) if wants_bias and bias is not None else None
        active_rows = None
        if not hidden.is_cuda:
            # Tokens without a gradient (clipped, or with an advantage of 0) contribute nothing and are
            # skipped. Their number is not read from a GPU, which would have to finish its work first.
            has_slope = (by_log_prob != 0).any(1)
            active = has_slope if by_entropy is None else has_slope | (by_entropy != 0)
            active_rows = active.nonzero().squeeze(-1)
        for piece in head.row_pieces(len(hidden if active_rows is None else active_rows)):
            rows = piece if active_rows is None else active_rows[piece]
            head.add_gradients(
                hidden[rows],
                targets[rows],
                normalizer[rows],
                by_log_prob[rows],
                None if by_entropy is None else (by_entropy[rows], entropy[rows]),
                rows,
                (d_hidden, d_weight, d_bias),
            )
        return (None if d_hidden is None else d_hidden.to(hidden.dtype)), None, d_weight, d_bias, None, None


class _Head:
    """Arithmetic of the head on blocks of tokens and of the vocabulary."""

    def __init__(self, weight: Tensor, bias: Tensor | None, options: HeadOptions, block: int) -> None:
        self.weight, self.bias, self.options, self.block = weight, bias, options, block
        # Tokens of a block. Large blocks are square: as many tokens as entries of the vocabulary.
        self.rows = max(1, min(block, max(_MIN_TOKENS, int(block**0.5))))

    def row_pieces(self, count: int) -> Iterator[slice]:
        """Yield the blocks of tokens."""
        return _pieces(count, self.rows)

    def _blocks(self, tokens: int) -> Iterator[slice]:
        return _pieces(len(self.weight), max(1, self.block // max(1, tokens)))

    def _weight(self, words: slice) -> Tensor:
        """Return the weights ``[v, H]`` of ``words`` as operands of products."""
        return self.weight[words].to(self.options.dtype)

    def _logits(self, hidden: Tensor, weight: Tensor, words: slice) -> tuple[Tensor, Tensor | None]:
        """Return final logits ``[n, v]`` of ``words`` and, with a cap, the derivative of the cap.

        ``hidden`` ``[n, H]`` and ``weight`` ``[v, H]`` are in the dtype of products.
        """
        softcap, scale = self.options.softcap, self.options.scale
        logits = linear(hidden, weight, None if self.bias is None else self.bias[words])
        slope = None
        if scale != 1:
            logits = logits.mul_(scale)
        if softcap is not None:
            tanh = torch.tanh(logits / softcap)
            logits, slope = softcap * tanh, 1 - tanh.square()
        if self.options.temperature != 1:
            logits = logits.div_(self.options.temperature)
        if columns := [token - words.start for token in self.options.blocked if _is_in(token, words)]:
            logits[:, columns] = _IMPOSSIBLE
        return logits, slope

    def score(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probabilities ``[n, K]`` of ``targets``, and log-sum-exp and entropy, each ``[n]``."""
        n, device = len(hidden), hidden.device
        highest = torch.full((n,), -torch.inf, device=device)
        total, weighted = torch.zeros(2, n, device=device)
        chosen = torch.zeros(targets.shape, device=device)
        operand = hidden.to(self.options.dtype)
        for words in self._blocks(n):
            logits, _ = self._logits(operand, self._weight(words), words)
            inside = (targets >= words.start) & (targets < words.stop)
            column = (targets - words.start).clamp(0, words.stop - words.start - 1)
            chosen = torch.where(inside, logits.gather(1, column), chosen)
            higher = torch.maximum(highest, logits.amax(1))
            shrink = (highest - higher).exp()
            logits -= higher[:, None]
            share = logits.exp()
            # Both sums are relative to the highest logit so far.
            block_total = share.sum(1)
            block_weighted = torch.linalg.vecdot(share, logits)
            # For the first block the total is 0 and the highest logit -inf, and their product is NaN.
            moved = torch.where(total > 0, (highest - higher) * total, total)
            weighted = (weighted + moved) * shrink + block_weighted
            total = total * shrink + block_total
            highest = higher
        normalizer = highest + total.log()
        return chosen - normalizer[:, None], normalizer, total.log() - weighted / total

    def top(self, hidden: Tensor, count: int) -> Tensor:
        """Return the ``count`` most probable tokens ``[n, count]``, in descending order."""
        best = torch.full((len(hidden), 0), -torch.inf, device=hidden.device)
        ids = torch.zeros((len(hidden), 0), dtype=torch.int64, device=hidden.device)
        operand = hidden.to(self.options.dtype)
        for words in self._blocks(len(hidden)):
            logits, _ = self._logits(operand, self._weight(words), words)
            values, columns = logits.topk(min(count, logits.shape[1]), 1)
            best, ids = torch.cat([best, values], 1), torch.cat([ids, columns + words.start], 1)
            best, order = best.topk(min(count, best.shape[1]), 1)
            ids = ids.gather(1, order)
        return ids

    def add_gradients(
        self,
        hidden: Tensor,
        targets: Tensor,
        normalizer: Tensor,
        by_log_prob: Tensor,
        by_entropy: tuple[Tensor, Tensor] | None,
        rows: Tensor | slice,
        gradients: tuple[Tensor | None, Tensor | None, Tensor | None],
    ) -> None:
        """Add the contribution of these tokens to the gradients of hidden states, weight and bias.

        ``targets`` and ``by_log_prob`` are ``[n, K]``. ``by_entropy`` has the incoming gradient of the
        entropy, and the entropy.
        """
        d_hidden, d_weight, d_bias = gradients
        dtype = self.options.dtype
        by_hidden = torch.zeros(hidden.shape, device=hidden.device)
        operand = hidden.to(dtype)
        for words in self._blocks(len(hidden)):
            weight = self._weight(words)
            logits, slope = self._logits(operand, weight, words)
            logits -= normalizer[:, None]
            inside = (targets >= words.start) & (targets < words.stop)
            column = (targets - words.start).clamp(0, words.stop - words.start - 1)
            if by_entropy is None and slope is None and hidden.is_cuda and targets.shape[1] == 1:
                d_logits = self._d_logits_on_gpu(logits, by_log_prob, inside, column)
            else:
                probabilities = logits.exp()
                if by_entropy is None:
                    d_logits = probabilities.mul_(-by_log_prob.sum(1, keepdim=True))
                else:
                    incoming, entropy = by_entropy
                    logits += entropy[:, None]
                    logits *= -incoming[:, None]
                    logits -= by_log_prob.sum(1, keepdim=True)
                    d_logits = probabilities.mul_(logits)
                d_logits.scatter_add_(1, column, by_log_prob * inside)
                if self.options.temperature != 1:
                    d_logits /= self.options.temperature
                if slope is not None:
                    d_logits *= slope
                if self.options.scale != 1:
                    d_logits *= self.options.scale
            if d_bias is not None:
                d_bias[words] += d_logits.sum(0, dtype=torch.float32)
            d_logits = d_logits.to(dtype)
            if d_hidden is not None:
                _add_product(by_hidden, d_logits, weight)
            if d_weight is not None:
                _add_product(d_weight[words], d_logits.T, operand)
        if d_hidden is not None:
            d_hidden[rows] = by_hidden

    def _d_logits_on_gpu(
        self, log_probs: Tensor, by_log_prob: Tensor, inside: Tensor, column: Tensor
    ) -> Tensor:
        """Return the gradient ``by_log_prob ([v = y] - p_v)`` of the logits, in the dtype of the products.

        All arguments but ``log_probs`` are ``[n, 1]``. ``log_probs`` ``[n, v]`` is overwritten. Only the last
        operation writes another array of that size, in the dtype of the products.
        """
        minus_own = log_probs.exp_().scatter_add_(1, column, -inside.to(log_probs.dtype))
        factor = by_log_prob * (-self.options.scale / self.options.temperature)
        d_logits = torch.empty_like(minus_own, dtype=self.options.dtype)
        return torch.mul(minus_own, factor, out=d_logits)


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute the float32 logits ``hidden @ weight.T + bias``, without a gradient.

    On a GPU the product of 16-bit operands is not rounded to 16 bits.

    Args:
        hidden: ``[N, H]``.
        weight: ``[V, H]`` in the dtype of ``hidden``.
        bias: ``[V]`` or None.
    """
    if _adds_in_float32(hidden):
        product = torch.mm(hidden, weight.T, out_dtype=torch.float32)
        return product if bias is None else product.add_(bias.float())
    return F.linear(hidden, weight, None if bias is None else bias.to(hidden.dtype)).float()


def _adds_in_float32(operand: Tensor) -> bool:
    """Return whether products have a kernel with a float32 result: of 16-bit operands on a GPU."""
    return operand.is_cuda and operand.dtype.itemsize == 2


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Compute ``total += left @ right``, in one call if the dtypes agree."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif _adds_in_float32(left):
        total += torch.mm(left, right, out_dtype=torch.float32)
    else:
        total += left @ right
