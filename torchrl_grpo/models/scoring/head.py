"""Log-probability and entropy under an output head, without storing the logits of the whole vocabulary.

The vocabulary is processed in blocks, whose log-sum-exps and entropies are merged. On a CPU a block fits in
the cache. The backward pass recomputes each block. Memory does not depend on the size of the vocabulary, and
depends on the number of tokens only through the hidden states. A fused kernel for some GPUs is in
:mod:`~torchrl_grpo.models.scoring.fused_head`.

There are few passes over the logits: three in the forward pass, and one in the backward pass of one target
without entropy, where products subtract the log-sum-exp and multiply by the factor of each token.

On a GPU, products of 16-bit operands are float32: nothing is rounded, and no number is read from the GPU.

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
# Columns that add a float32 number per token to a product. Its 16-bit parts take three, and GPUs take a width
# that is a multiple of 8.
_COLUMNS = 8


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

    def _weight(self, words: slice, columns: int = 0) -> Tensor:
        """Return the weights ``[v, H]`` of ``words`` as operands of products, with columns of ones."""
        weight = self.weight[words]
        if not columns:
            return weight.to(self.options.dtype)
        wide = weight.new_ones(len(weight), weight.shape[1] + columns, dtype=self.options.dtype)
        wide[:, :-columns] = weight
        return wide

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
        chosen = torch.zeros(targets.shape, device=hidden.device)
        normalizers, entropies = [], []
        operand = hidden.to(self.options.dtype)
        for words in self._blocks(len(hidden)):
            logits, _ = self._logits(operand, self._weight(words), words)
            inside, column = _place(targets, words)
            chosen = torch.where(inside, logits.gather(1, column), chosen)
            log_shares = torch.log_softmax(logits, 1)
            # The difference is the same in all columns, but a forbidden token's logit has no digits for it.
            normalizers.append(self._allowed(logits, words) - self._allowed(log_shares, words))
            shares = torch.exp(log_shares, out=logits)
            # A CPU's kernel for products of rows is slower, and less exact.
            on_gpu, column = logits.is_cuda, log_shares[:, :, None]
            total = torch.bmm(shares[:, None], column).flatten() if on_gpu else shares.mul_(log_shares).sum(1)
            entropies.append(-total)
        normalizer = (by_block := torch.stack(normalizers)).logsumexp(0)
        # A block's share of the probability, and the entropy of choosing a block and then a token in it.
        surprise = normalizer - by_block
        entropy = ((-surprise).exp() * (torch.stack(entropies) + surprise)).sum(0)
        return chosen - normalizer[:, None], normalizer, entropy

    def _allowed(self, values: Tensor, words: slice) -> Tensor:
        """Return a column ``[n]`` of ``values`` ``[n, v]`` whose token neither bias nor blocking forbids."""
        blocked = [token - words.start for token in self.options.blocked if _is_in(token, words)]
        if self.bias is None:
            return values[:, next((x for x in range(values.shape[1]) if x not in blocked), 0)]
        bias = self.bias[words]
        if blocked:
            bias = bias.index_fill(0, torch.tensor(blocked, device=bias.device), -torch.inf)
        return values.index_select(1, bias.argmax()[None])[:, 0]

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
        dtype, gain = self.options.dtype, self.options.scale / self.options.temperature
        by_hidden = torch.zeros(hidden.shape, device=hidden.device)
        # A CPU rounds logits to 16 bits. Then the normalizer is that of rounded logits, and only they give
        # probabilities whose sum is 1. In float16, states times a factor could overflow.
        exact = dtype.itemsize > 2 or (hidden.is_cuda and dtype != torch.float16)
        one_pass = exact and by_entropy is None and self.options.softcap is None and targets.shape[1] == 1
        operand = wide = hidden.to(dtype)
        if one_pass:
            wide, factor = _append(operand, -normalizer / gain), by_log_prob * -gain
            operand = (hidden * factor).to(dtype)
        for words in self._blocks(len(hidden)):
            place = _place(targets, words)
            weight = self._weight(words, _COLUMNS if one_pass else 0)
            logits, slope = self._logits(wide, weight, words)
            if one_pass:
                weight = weight[:, :-_COLUMNS]
                d_logits = _minus_own(logits, dtype, *place)
                if d_bias is not None:
                    d_bias[words] += (d_logits * factor).sum(0, dtype=torch.float32)
            else:
                logits -= normalizer[:, None]
                d_logits = _d_logits(logits, by_log_prob, by_entropy, *place)
                if gain != 1:
                    d_logits *= gain
                if slope is not None:
                    d_logits *= slope
                if d_bias is not None:
                    d_bias[words] += d_logits.sum(0, dtype=torch.float32)
                d_logits = d_logits.to(dtype)
            if d_hidden is not None:
                _add_product(by_hidden, d_logits, weight)
            if d_weight is not None:
                _add_product(d_weight[words], d_logits.T, operand)
        if d_hidden is not None:
            d_hidden[rows] = by_hidden.mul_(factor) if one_pass else by_hidden


def _place(targets: Tensor, words: slice) -> tuple[Tensor, Tensor]:
    """Return whether ``targets`` are among ``words``, and their columns or any, ``[n, K]`` each."""
    inside = (targets >= words.start) & (targets < words.stop)
    return inside, (targets - words.start).clamp(0, words.stop - words.start - 1)


def _append(hidden: Tensor, numbers: Tensor) -> Tensor:
    """Append columns to ``hidden`` ``[n, H]`` whose sum is ``numbers`` ``[n]``, also if it has 16 bits."""
    columns, rest = hidden.new_zeros(len(hidden), _COLUMNS), numbers
    for part in columns.unbind(1)[:3]:
        part.copy_(rest)
        rest = rest - part
    return torch.cat([hidden, columns], 1)


def _minus_own(log_probs: Tensor, dtype: torch.dtype, inside: Tensor, column: Tensor) -> Tensor:
    """Return ``p_v - [v = y]`` in ``dtype``, in one pass over ``log_probs`` ``[n, v]``, its memory."""
    # The entry of the target is rounded once, after the subtraction.
    own = log_probs.gather(1, column).float()
    result = log_probs if log_probs.dtype == dtype else torch.empty_like(log_probs, dtype=dtype)
    torch.exp(log_probs, out=result)
    # On a CPU, scatter_ in bfloat16 takes as long as two passes.
    place = torch.arange(len(result), device=result.device), column[:, 0]
    return result.index_put_(place, torch.where(inside, own.expm1(), own.exp()).to(dtype)[:, 0])


def _d_logits(
    log_probs: Tensor,
    by_log_prob: Tensor,
    by_entropy: tuple[Tensor, Tensor] | None,
    inside: Tensor,
    column: Tensor,
) -> Tensor:
    """Return the gradient of the logits at temperature 1. ``log_probs`` ``[n, v]`` is overwritten."""
    probabilities, total = log_probs.exp(), by_log_prob.sum(1, keepdim=True)
    if by_entropy is None:
        d_logits = probabilities.mul_(-total)
    else:
        incoming, entropy = (values[:, None] for values in by_entropy)
        d_logits = log_probs.mul_(-incoming).sub_(incoming * entropy + total).mul_(probabilities)
    return d_logits.scatter_add_(1, column, by_log_prob * inside)


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
