"""Run groups of responses as one row without padding, with each prompt only once.

Every matrix product, norm and activation of the model runs over a single row of real tokens: all prompts,
then all responses. Only attention depends on which tokens see each other. It is registered with transformers'
attention interface, so gradient checkpointing and adapters work as usual. Gradients of all responses
accumulate in the states of the prompt. Attention is computed in padded rectangles with masks, or by a kernel
for variable lengths (:mod:`~torchrl_grpo.models.scoring.varlen`).

Axes: ``P`` prompts, ``G`` responses per prompt, ``L`` prompt tokens, ``T`` response tokens, ``N`` tokens in
the row, ``H`` heads, ``D`` size of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from torchrl_grpo.models.scoring import attention, varlen
from torchrl_grpo.models.scoring.dense_mask import additive
from torchrl_grpo.models.scoring.transfer import upload_packed
from torchrl_grpo.models.scoring.varlen import VarlenLayout

_NAME = "grpo_shared_prefix"
# Arguments for sinks, caps and biases of attention scores, as transformers names them.
_OTHER_TERMS = ("s_aux", "softcap", "position_bias")


class PrefixLayout:
    """Positions of the tokens of a batch of groups in the row.

    The last token of a response is a target but not an input, so it is not in the row. Everything is computed
    on the CPU and copied to the device at once, so no number is read back from a GPU.

    Args:
        prompt: ``[P, L]`` int64, padded on the left. All tensors are on the CPU.
        prompt_mask: ``[P, L]`` bool, True on real tokens.
        response: ``[P, G, T]`` int64, padded on the right.
        response_mask: ``[P, G, T]`` bool, True on real tokens.
        device: device of the model.
        prompt_positions: positions of the prompts' tokens, ``[P, L]``, or ``[A, P, L]`` for positions of A
            axes. A response goes on after the largest. None counts tokens.

    Attributes:
        ids: token ids of the row, ``[1, N]``.
        positions: position of each token in its own sequence, ``[1, N]``, or ``[A, 1, N]``.
        source: position in the row of the token that predicts each response token, in the order of the mask.
        classes: classes of prompts of similar length, with their responses.
        attended: number of layers that have used the layout.
    """

    def __init__(
        self,
        prompt: Tensor,
        prompt_mask: Tensor,
        response: Tensor,
        response_mask: Tensor,
        device: torch.device,
        prompt_positions: Tensor | None = None,
    ) -> None:
        P, G, T = response.shape
        # Prompts are sorted by length and divided into classes of similar length, so that padded rectangles
        # are at least half full.
        by_length = row_order(prompt_mask)
        prompt, prompt_mask = prompt[by_length], prompt_mask[by_length]
        response, response_mask = response[by_length], response_mask[by_length]
        lengths = prompt_mask.sum(-1)
        classes = list(_similar_lengths(lengths.tolist()))
        # Responses are sorted by class and then by length, so that neighbors in the row have similar lengths.
        input_mask = response_mask[..., 1:].reshape(P * G, -1)
        counts = input_mask.sum(-1)
        order = torch.cat(
            [
                rows.start * G + counts[rows.start * G : rows.stop * G].argsort(descending=True, stable=True)
                for rows, _ in classes
            ]
        )
        input_mask, counts = input_mask[order], counts[order]
        prefix_classes: list[_Class] = []
        for rows, width in classes:
            of_class = slice(rows.start * G, rows.stop * G)
            class_mask, class_order = input_mask[of_class], order[of_class]
            runs = [
                _Run(
                    _Ragged.from_mask(class_mask[run, :longest]),
                    class_order[run].div(G, rounding_mode="floor") - rows.start,
                )
                for run, longest in _similar_lengths(counts[of_class].tolist())
            ]
            prompts = _Ragged.from_mask(prompt_mask[rows].flip(-1)[:, :width])
            prefix_classes.append(_Class(prompts, lengths[rows], runs))
        inputs = response[..., :-1].reshape(P * G, -1)[order][input_mask]
        ids = torch.cat([prompt[prompt_mask], inputs])
        axes, starts = (prompt_mask.long().cumsum(-1) - 1)[None], lengths
        if prompt_positions is not None:
            axes = prompt_positions.reshape(-1, *prompt.shape)[:, by_length]
            starts = axes.masked_fill(~prompt_mask, -1).amax((0, 2)) + 1
        positions = axes[:, prompt_mask]
        steps = torch.arange(input_mask.shape[1])
        later = (starts.repeat_interleave(G)[order][:, None] + steps)[input_mask]
        # The last token of the prompt predicts token 0, and token t - 1 predicts token t.
        slots = torch.zeros(input_mask.shape, dtype=torch.int64)
        slots[input_mask] = positions.shape[1] + torch.arange(len(later))
        first = (lengths.cumsum(0) - 1)[:, None, None].expand(P, G, min(T, 1))
        source = torch.cat([first, torch.empty_like(slots).index_copy_(0, order, slots).view(P, G, -1)], -1)
        # Back to the order of the caller's mask.
        back = by_length.argsort()
        source = source[back][response_mask[back]]
        positions = torch.cat([positions, later.expand(len(axes), -1)], dim=1).flatten()
        ids, positions, self.source, self.classes = upload_packed(
            (ids, positions, source, prefix_classes), device
        )
        self.ids, self.positions = ids[None], positions.view(*([] if len(axes) == 1 else [len(axes)]), 1, -1)
        self.attended = 0
        self._masks: dict[tuple[int | None, torch.dtype], list[tuple[Tensor | None, list[Tensor]]]] = {}

    @property
    def sizes(self) -> list[int]:
        """Token counts in the order of the row: of each class's prompts, then of each run of responses."""
        runs = [run.responses.total for class_ in self.classes for run in class_.runs]
        return [*(class_.prompts.total for class_ in self.classes), *runs]

    def masks(
        self, window: int | None, dtype: torch.dtype = torch.bool
    ) -> list[tuple[Tensor | None, list[Tensor]]]:
        """Return the attention masks of each class, for a sliding ``window`` of tokens or None.

        Args:
            window: number of tokens that a query sees, itself included; None for all.
            dtype: bool for masks that are True on visible keys, or the dtype of summands of the scores.

        Returns:
            For each class, the mask of the prompts ``[L, L]``, or None for plain causal attention, and the
            masks of its runs of B responses ``[B, 1, W, L + W]``. The keys are those of the prompt, followed
            by those of the response. Prompts and responses are padded on the right, so the causal mask alone
            hides padding from their own queries.
        """
        if (window, dtype) not in self._masks:
            masks = [class_.masks(window) for class_ in self.classes]
            if dtype != torch.bool:
                masks = [
                    (
                        None if prompts is None else additive(prompts, dtype),
                        [additive(x, dtype) for x in runs],
                    )
                    for prompts, runs in masks
                ]
            self._masks[window, dtype] = masks
        return self._masks[window, dtype]


def row_order(prompt_mask: Tensor) -> Tensor:
    """Return the order ``[P]`` in which the prompts of a mask ``[P, L]`` are in the row."""
    return prompt_mask.sum(-1).argsort(descending=True, stable=True)


class _Class(NamedTuple):
    """Prompts of similar length and their responses.

    Attributes:
        prompts: conversion of the prompts between row and rectangle.
        lengths: lengths of the prompts, ``[B]``.
        runs: responses to the prompts.
    """

    prompts: _Ragged
    lengths: Tensor
    runs: list[_Run]

    def masks(self, window: int | None) -> tuple[Tensor | None, list[Tensor]]:
        L, prompts = self.prompts.width, None
        if window is not None and window < L:
            order = torch.arange(L, device=self.lengths.device)
            distance = order[:, None] - order
            prompts = (distance >= 0) & (distance < window)
        return prompts, [self._response_mask(run, window) for run in self.runs]

    def _response_mask(self, run: _Run, window: int | None) -> Tensor:
        L, W = self.prompts.width, run.responses.width
        device = self.lengths.device
        lengths = self.lengths[run.prompts][:, None, None, None]
        query, key = torch.arange(W, device=device)[:, None], torch.arange(L + W, device=device)
        own = key >= L
        seen = torch.where(own, key - L <= query, key < lengths)
        if window is None:
            return seen
        position = torch.where(own, key - L + lengths, key)
        return seen & (query + lengths - position < window)


class _Run(NamedTuple):
    """Responses of similar length that are adjacent in the row.

    Attributes:
        responses: conversion of the responses between row and rectangle.
        prompts: index of each response's prompt in the class, ``[B]``.
    """

    responses: _Ragged
    prompts: Tensor


def _similar_lengths(counts: Sequence[int]) -> Iterator[tuple[slice, int]]:
    """Divide descending lengths into slices of similar lengths.

    Within a slice all lengths are at least half of the first. Yields the slice and its first length.
    """
    start = 0
    while start < len(counts) and counts[start] > 0:
        stop = next((i for i in range(start, len(counts)) if 2 * counts[i] < counts[start]), len(counts))
        yield slice(start, stop), counts[start]
        start = stop


class _Ragged(NamedTuple):
    """Conversion of rows of different lengths between a flat list of tokens and a right-padded rectangle.

    Attributes:
        rows: number of rows B.
        width: width W of the rectangle.
        total: number of tokens n.
        slots: entry of the rectangle that each token is in, ``[n]``; None if there is no padding.
        tokens: token that each entry of the rectangle holds, ``[B W]``; None if there is no padding.
    """

    rows: int
    width: int
    total: int
    slots: Tensor | None
    tokens: Tensor | None

    @classmethod
    def from_mask(cls, mask: Tensor) -> _Ragged:
        """Make it from ``[B, W]`` bool on the CPU, True on the leading entries of each row."""
        rows, width = mask.shape
        total = int(mask.sum())
        if total == mask.numel():
            return cls(rows, width, total, None, None)
        slots = mask.flatten().nonzero().squeeze(-1)
        # Padding repeats a real token, because it must be finite: a mask gives it weight 0, and 0 times
        # infinity is NaN.
        return cls(rows, width, total, slots, (mask.flatten().cumsum(0) - 1).clamp(min=0))

    def pad(self, tokens: Tensor) -> Tensor:
        """Convert ``[1, H, n, D]`` to ``[B, H, W, D]``."""
        # The gradient of an index would be a copy.
        flat = tokens.squeeze(0).transpose(0, 1)
        if self.slots is not None:
            flat = _Gather.apply(flat, self.tokens, self.slots)  # type: ignore[no-untyped-call]
        return flat.reshape(self.rows, self.width, *flat.shape[1:]).transpose(1, 2)

    def flat(self, padded: Tensor) -> Tensor:
        """Convert ``[B, H, W, D]`` to ``[1, n, H, D]``."""
        rows = padded.transpose(1, 2).flatten(0, 1)
        return (rows if self.slots is None else rows.index_select(0, self.slots))[None]


class _Gather(torch.autograd.Function):
    """Select the rows ``tokens`` of a tensor. The gradient selects the rows ``slots`` and drops padding.

    The backward pass of ``index_select`` adds row by row. Here every row is used once except in padding, so
    the backward pass is a gather too.
    """

    @staticmethod
    def forward(ctx: Any, flat: Tensor, tokens: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        return flat.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].index_select(0, ctx.saved_tensors[0]), None, None


# Compiling would not help: shapes change with every batch, and the products are kernels already.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    prefix_layout: PrefixLayout | VarlenLayout | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer: over a row if the call has a layout, else the usual attention.

    Raises:
        ValueError: the layer's scores have a term that is not supported.
    """
    if terms := [name for name in _OTHER_TERMS if options.get(name) is not None]:
        raise ValueError(f"its attention has {', '.join(terms)}")
    if prefix_layout is None:
        whole: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return whole
    layout, dtype = prefix_layout, _computed_dtype(query)
    if isinstance(layout, VarlenLayout):
        return varlen.attend(query, key, value, layout, sliding_window, scaling, dtype), None
    layout.attended += 1
    # On a CPU in bfloat16, attention adds a mask to float32 scores.
    on_cpu = torch.float32 if dtype == torch.bfloat16 else torch.bool
    # Under autocast, queries, keys and values may have different dtypes. Keys and values are cast last, so
    # that gradients of a prompt's keys accumulate in the wider dtype.
    query = query.to(dtype)
    pieces = zip(*(x.split(layout.sizes, dim=2) for x in (query, key, value)), strict=True)
    of_prompts = [next(pieces) for _ in layout.classes]
    out, of_responses = [], []
    for class_, (prompt_mask, run_masks), (q, k, v) in zip(
        layout.classes,
        layout.masks(sliding_window, dtype if query.is_cuda else on_cpu),
        of_prompts,
        strict=True,
    ):
        kp, vp = class_.prompts.pad(k), class_.prompts.pad(v)
        out.append(class_.prompts.flat(_attend(class_.prompts.pad(q), kp, vp, prompt_mask, scaling)))
        for run, mask in zip(class_.runs, run_masks, strict=True):
            q, k, v = next(pieces)
            keys, values = (
                torch.cat([shared.index_select(0, run.prompts), run.responses.pad(own)], dim=2)
                for shared, own in ((kp, k), (vp, v))
            )
            of_responses.append(
                run.responses.flat(_attend(run.responses.pad(q), keys, values, mask, scaling))
            )
    return torch.cat([*out, *of_responses], dim=1), None


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Attention of ``[B, H, T, D]`` queries, causal if there is no mask."""
    dtype = _computed_dtype(query)
    if attention.is_faster(query, key, dtype):
        return attention.attend(query, key.to(dtype), value.to(dtype), mask, scaling)
    shared = query.shape[1] // key.shape[1]
    if shared > 1 and query.is_cuda:
        # On a GPU the kernel that supports masks does not support grouped heads. Without repeated heads,
        # PyTorch would fall back to a kernel that stores all scores. They are cast first, because autocast
        # would cast the repeated ones.
        key, value = key.to(dtype), value.to(dtype)
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _computed_dtype(query: Tensor) -> torch.dtype:
    """Return the dtype in which products of queries are computed."""
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, sdpa_mask)


def enable(model: PreTrainedModel) -> str | None:
    """Make ``model`` accept rows of groups, in addition to its usual inputs.

    Returns:
        The reason why the model cannot, as far as its configuration shows, or None on success.
    """
    config = model.config.get_text_config()
    settings = config.to_dict()
    kinds = set(settings.get("layer_types") or ["full_attention"])
    if other := kinds - {"full_attention", "sliding_attention"}:
        return f"its layers are {', '.join(sorted(other))}"
    if settings.get("attn_logit_softcapping") is not None:
        return "it caps its attention scores (attn_logit_softcapping)"
    if config._attn_implementation != _NAME:
        # A model for pictures has other parts with attention.
        (model if config is model.config else model.get_decoder()).set_attn_implementation(_NAME)
    if config._attn_implementation != _NAME:
        return "its attention does not use transformers' attention interface"
    return None


def hidden_states(backbone: nn.Module, layout: PrefixLayout | VarlenLayout, **inputs: Tensor) -> Tensor:
    """Compute the last hidden states ``[M, H]`` that predict the M response tokens, in the order of the mask.

    Args:
        backbone: backbone, without the head, of a model that :func:`enable` has prepared.
        layout: layout of the tokens.
        inputs: further inputs of the model, for pictures.

    Raises:
        ValueError: the model's attention does not go through transformers' attention interface.
    """
    # Transformers passes a mask of four axes through unchanged, so it does not build an N x N mask.
    dummy_mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=layout.ids.device)
    output = backbone(
        input_ids=layout.ids,
        attention_mask=dummy_mask,
        position_ids=layout.positions,
        use_cache=False,
        prefix_layout=layout,
        **inputs,
    )
    if not layout.attended:
        raise ValueError("its attention does not use transformers' attention interface")
    hidden: Tensor = output.last_hidden_state[0]
    return hidden.index_select(0, layout.source)
