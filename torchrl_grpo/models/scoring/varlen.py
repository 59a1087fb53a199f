"""Attention over shared prompts with flash-attention's kernel for variable lengths (varlen), without masks.

All tokens of the micro-batch are packed into one row: first all prompts, then all responses, group by group.
A layer calls the kernel twice:

1. Every prompt and every response attends to itself, causally.
2. The responses of a group, taken together, attend to all keys of their prompt.

The two results of a response token are merged by the logarithms of their softmax denominators (log-sum-exp).
The backward pass calls the kernel's backward pass for each of the two, with the merged output and the merged
log-sum-exp. Then the probabilities that the kernel recomputes equal those of the whole softmax, and so do the
gradients.

A layer with a sliding window that is shorter than a sequence makes one causal call instead, in which the keys
of each response follow a copy of the end of its prompt. The copies are made in each pass and are not kept.

The kernel is PyTorch's own, so nothing has to be installed. It needs a GPU of compute capability 8.0 or
newer and computes in 16 bits. :mod:`~torchrl_grpo.models.scoring.varlen_choice` decides where it is used.
:mod:`~torchrl_grpo.models.scoring.shared_prefix` has the attention with dense masks.

Axes: ``P`` prompts, ``G`` responses per prompt, ``L`` prompt tokens, ``T`` response tokens, ``N`` tokens in
the row, ``M`` response tokens in the row, ``H`` query heads, ``K`` key heads, ``D`` size of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrl_grpo.models.scoring.transfer import upload_packed

_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward


class Spans(NamedTuple):
    """Sequences of one call of the kernel.

    Attributes:
        query_starts: positions at which the queries of each sequence begin, and their number at the end,
            int32 ``[sequences + 1]``.
        key_starts: the same for the keys.
        most_queries: largest number of queries in a sequence, at least 2. With 1, the kernel would take
            its path for decoding, which computes its results in another layout.
        most_keys: largest number of keys in a sequence.
    """

    query_starts: Tensor
    key_starts: Tensor
    most_queries: int
    most_keys: int


class Window(NamedTuple):
    """Sequences of a call for layers with a sliding window.

    Attributes:
        keys: position in the row of each key that the call reads.
        spans: sequences of the call.
    """

    keys: Tensor
    spans: Spans


class VarlenLayout:
    """Positions of the tokens of a batch of groups in the row.

    The last token of a response is a target but not an input, so it is not in the row. Everything is computed
    on the CPU and copied to the device at once, so no number is read back from a GPU.

    Args:
        prompt: ``[P, L]`` int64, padded on the left.
        prompt_mask: ``[P, L]`` bool, True on real tokens.
        response: ``[P, G, T]`` int64, padded on the right.
        response_mask: ``[P, G, T]`` bool, True on real tokens.
        device: device of the model.

    Attributes:
        ids: token ids of the row, ``[1, N]``.
        positions: position of each token in its own sequence, ``[1, N]``.
        source: position in the row of the token that predicts each response token, in the order of the mask.
        prompts: number of prompt tokens in the row.
        attended: number of layers that have used the layout.
    """

    def __init__(
        self,
        prompt: Tensor,
        prompt_mask: Tensor,
        response: Tensor,
        response_mask: Tensor,
        device: torch.device,
    ) -> None:
        prompt, prompt_mask, response, response_mask = (
            tensor.cpu() for tensor in (prompt, prompt_mask, response, response_mask)
        )
        input_mask = response_mask[..., 1:]
        self._device = device
        counts = input_mask.sum(-1)
        # Prompts without a response token in the row come last, so that the others are one block of keys.
        order = (counts.sum(-1) == 0).to(torch.int8).argsort(stable=True)
        prompt, prompt_mask, response, input_mask = (
            x[order] for x in (prompt, prompt_mask, response, input_mask)
        )
        self._lengths, self._counts = prompt_mask.sum(-1), counts[order]
        lengths, counts = self._lengths, self._counts.flatten()
        per_group = self._counts.sum(-1)
        self.prompts = int(lengths.sum())
        self_lengths = torch.cat([lengths, counts])
        self_lengths = self_lengths[self_lengths > 0]
        answered = per_group > 0
        starts = _starts(lengths)
        # Token 0 of a response is predicted by the last token of the prompt, and token t by token t - 1.
        last = (starts[1:] - 1)[:, None].expand(-1, response.shape[1])
        response_starts = self.prompts + _starts(counts)[:-1].view_as(last)
        steps = torch.arange(response.shape[-1])
        source = torch.where(steps > 0, response_starts[..., None] + steps - 1, last[..., None])
        back = order.argsort()
        positions = (steps[:-1] + lengths[:, None, None]).expand(input_mask.shape)[input_mask]
        packed = {
            "ids": torch.cat([prompt[prompt_mask], response[..., :-1][input_mask]]),
            "positions": torch.cat([(prompt_mask.cumsum(-1) - 1)[prompt_mask], positions]),
            "source": source[back][response_mask],
            "self": _starts(self_lengths),
            "group": _starts(per_group[answered]),
            "shared": _starts(lengths[answered]),
        }
        on_device = upload_packed(packed, device)
        self.ids, self.positions, self.source = (
            on_device["ids"][None],
            on_device["positions"][None],
            on_device["source"],
        )
        self_starts = on_device["self"].int()
        most = int(self_lengths.max())
        self.self_spans = Spans(self_starts, self_starts, max(2, most), most)
        self.prompt_spans = None
        if bool(answered.any()):
            self.prompt_spans = Spans(
                on_device["group"].int(),
                on_device["shared"].int(),
                max(2, int(per_group.max())),
                int(lengths[answered].max()),
            )
        self.shared_keys = int(lengths[answered].sum())
        self._longest = int((self._lengths[:, None] + self._counts).max())
        self._windows: dict[int, Window] = {}
        self.attended = 0

    def window(self, size: int | None) -> Window | None:
        """Return the call for layers with a sliding window of ``size`` tokens.

        None means that no sequence is longer than the window, or that the layer has none.
        """
        if size is None or self._longest <= size:
            return None
        if size not in self._windows:
            self._windows[size] = self._make_window(size)
        return self._windows[size]

    def _make_window(self, size: int) -> Window:
        """Append to the prompts, for each response, the visible end of its prompt and its own keys."""
        G = self._counts.shape[1]
        counts = self._counts.flatten()
        ends = _starts(self._lengths)[1:].repeat_interleave(G)
        tails = self._lengths.clamp(max=size - 1).repeat_interleave(G)
        response_starts = self.prompts + _starts(counts)[:-1]
        kept = counts > 0
        first = torch.stack([ends - tails, response_starts], -1)[kept].flatten()
        number = torch.stack([tails, counts], -1)[kept].flatten()
        keys = torch.cat([torch.arange(self.prompts), _ranges(first, number)])
        key_counts = torch.cat([self._lengths, (tails + counts)[kept]])
        on_device = upload_packed({"keys": keys, "starts": _starts(key_counts)}, self._device)
        spans = self.self_spans._replace(
            key_starts=on_device["starts"].int(), most_keys=int(key_counts.max())
        )
        return Window(on_device["keys"], spans)


def _starts(counts: Tensor) -> Tensor:
    """Return the cumulative sums of ``counts``, with a 0 in front."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


def _ranges(first: Tensor, number: Tensor) -> Tensor:
    """Concatenate ranges that begin at ``first`` and have ``number`` entries each."""
    shift = (first - _starts(number)[:-1]).repeat_interleave(number)
    return torch.arange(len(shift)) + shift


@dataclass(frozen=True)
class _Call:
    """Arguments of the kernel other than its tensors.

    Attributes:
        spans: sequences.
        causal: whether a query sees no later key. The last query of a sequence sees its last key.
        left: number of earlier keys that a query sees; -1 for all.
        scale: factor of the scores; None for ``D ** -0.5``.
    """

    spans: Spans
    causal: bool
    scale: float | None
    left: int = -1

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Attend from ``[N, H, D]`` to ``[N, K, D]``; return ``[N, H, D]`` and the log-sum-exp ``[H, N]``."""
        out, lse, *_ = _forward(
            query, key, value, *self.spans, 0.0, self.causal, False, scale=self.scale, **self._window()
        )
        return out, lse

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value.

        ``out`` and ``lse`` may be those of a softmax over more keys than these.
        """
        # Dropout's random state; unused, because its rate is 0.
        unused = query.new_empty(2, dtype=torch.uint64)
        grads: tuple[Tensor, Tensor, Tensor] = _backward(
            *(gradient, query, key, value, out, lse, *self.spans, 0.0, self.causal, unused, unused),
            scale=self.scale,
            **self._window(),
        )
        return grads

    def _window(self) -> dict[str, int]:
        return {"window_size_left": self.left, "window_size_right": 0 if self.causal else -1}


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: VarlenLayout,
    window: int | None,
    scaling: float | None,
    dtype: torch.dtype,
) -> Tensor:
    """Attention of one layer over a row of groups.

    Args:
        query: ``[1, H, N, D]``.
        key: ``[1, K, N, D]``.
        value: ``[1, K, N, D]``.
        layout: layout of the row.
        window: number of tokens that a query sees, itself included; None for all.
        scaling: factor of the scores; None for ``D ** -0.5``.
        dtype: dtype of the products. Gradients of keys and values are added in the dtypes of the arguments.

    Returns:
        ``[1, N, H, D]`` in ``dtype``.

    Raises:
        RuntimeError: the kernel does not support the sizes, the dtype or the device.
    """
    layout.attended += 1
    with torch.autocast(query.device.type, enabled=False):
        out: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
            query, key, value, layout, window, scaling, dtype
        )
    return out


class _Attention(torch.autograd.Function):
    """:func:`attend`."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: VarlenLayout,
        size: int | None,
        scale: float | None,
        dtype: torch.dtype,
    ) -> Tensor:
        q, k, v = (_rows(x, dtype) for x in (query, key, value))
        window = layout.window(size)
        if window is not None:
            assert size is not None
            call = _Call(window.spans, True, scale, left=size - 1)
            out, lse = call.forward(q, k.index_select(0, window.keys), v.index_select(0, window.keys))
        else:
            out, lse = _Call(layout.self_spans, True, scale).forward(q, k, v)
            if layout.prompt_spans is not None:
                shared = slice(None, layout.shared_keys)
                other = _Call(layout.prompt_spans, False, scale).forward(
                    q[layout.prompts :], k[shared], v[shared]
                )
                _merge(out[layout.prompts :], lse[:, layout.prompts :], *other)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.window, ctx.size, ctx.scale = layout, window, size, scale
        ctx.dtypes = query.dtype, key.dtype, value.dtype
        return out[None]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        layout, window, gradient = ctx.layout, ctx.window, gradients[0][0].contiguous()
        if window is not None:
            call = _Call(window.spans, True, ctx.scale, left=ctx.size - 1)
            keys, values = k.index_select(0, window.keys), v.index_select(0, window.keys)
            grad_q, grad_keys, grad_values = call.backward(gradient, q, keys, values, out, lse)
            # A key of a prompt may have a copy for each response. They are added in at least float32.
            grad_k, grad_v = (
                torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)).index_add_(
                    0, window.keys, grad_copies.to(torch.promote_types(x.dtype, torch.float32))
                )
                for x, grad_copies in ((k, grad_keys), (v, grad_values))
            )
            grads = [x.to(dtype) for x, dtype in zip((grad_q, grad_k, grad_v), ctx.dtypes, strict=True)]
        else:
            call = _Call(layout.self_spans, True, ctx.scale)
            grads = [
                x.to(dtype)
                for x, dtype in zip(call.backward(gradient, q, k, v, out, lse), ctx.dtypes, strict=True)
            ]
            if layout.prompt_spans is not None:
                own, shared = slice(layout.prompts, None), slice(None, layout.shared_keys)
                more = _Call(layout.prompt_spans, False, ctx.scale).backward(
                    gradient[own], q[own], k[shared], v[shared], out[own], lse[:, own].contiguous()
                )
                for total, part, place in zip(grads, more, (own, shared, shared), strict=True):
                    total[place] += part
        return *(x.transpose(0, 1)[None] for x in grads), None, None, None, None


def _rows(heads: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert ``[1, H, N, D]`` to contiguous ``[N, H, D]`` in ``dtype``, in at most one pass."""
    rows = heads[0].transpose(0, 1)
    if rows.dtype == dtype and rows.is_contiguous():
        return rows
    return torch.empty(rows.shape, dtype=dtype, device=rows.device).copy_(rows)


def _merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Merge attention over two sets of keys, in place in the first.

    Args:
        out: ``[M, H, D]``.
        lse: ``[H, M]``, finite.
        other_out: ``[M, H, D]``.
        other_lse: ``[H, M]``, finite.
    """
    diff = (other_lse - lse).mT[..., None]
    share = torch.sigmoid(diff)
    merged = torch.addcmul(out * torch.sigmoid(-diff), other_out, share)
    out.copy_(merged)
    lse.copy_(torch.logaddexp(lse, other_lse))
