"""Decide whether attention over shared prompts uses the kernel for variable lengths.

The kernel (:mod:`~torchrl_grpo.models.scoring.varlen`) is tried before it is used: its results and gradients
on random numbers, and the model's log-probabilities on a few tokens.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from transformers import PreTrainedModel

from torchrl_grpo.config.values import PrefixAttention
from torchrl_grpo.errors import ModelError, first_line
from torchrl_grpo.models.scoring import trial, varlen
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.models.scoring.upcast import Upcast
from torchrl_grpo.models.scoring.varlen import VarlenLayout
from torchrl_grpo.runtime.oom import ran_out_of_memory

_CAPABILITY = (8, 0)
_HALF = (torch.bfloat16, torch.float16)
# Lengths of prompts and their responses in the trial of the kernel. Its blocks have up to 128 tokens.
_PROMPTS = (150, 3)
_RESPONSES = ((140, 1), (2, 200))
_WINDOWS = (None, 70)
# Largest error of the kernel, as a share of the size of a result. Rounding operands and results to
# bfloat16 gives 0.0025.
_TOLERANCE = 0.02
# A model's log-probabilities may differ by this multiple of what 16 bits change anyway.
_ROUNDINGS = 4


def choose_attention(scorer: TokenScorer, setting: PrefixAttention, longest: int | None = None) -> None:
    """Set ``scorer.varlen``.

    It warns if the kernel should work here but does not.

    Args:
        scorer: scorer of a prepared model that is not yet sharded.
        setting: value of ``train_model.prefix_attention``.
        longest: largest number of tokens in a sequence; None if unknown.

    Raises:
        ModelError: the kernel is requested and cannot be used.
    """
    if setting == PrefixAttention.dense or (setting == PrefixAttention.auto and not scorer.shares_prefix):
        return
    reason = unsupported(scorer)
    expected = reason is None
    if expected:
        reason = failure_reason(scorer, longest)
    scorer.varlen = reason is None
    if reason is not None and setting == PrefixAttention.varlen:
        raise ModelError(
            f"train_model.prefix_attention=varlen cannot be used ({reason}); write "
            "train_model.prefix_attention=auto"
        )
    if reason is not None and expected:
        warnings.warn(
            f"train_model.prefix_attention=auto: attention over shared prompts uses masks, because {reason}",
            stacklevel=2,
        )


def unsupported(scorer: TokenScorer) -> str | None:
    """Return why the kernel is not meant for this scorer, or None if it is."""
    weight = next(scorer.model.parameters())
    dtype = scorer.autocast_dtype or scorer.model.dtype
    if not scorer.shares_prefix:
        return "the model's prompts are run once per response"
    if not weight.is_cuda:
        return "it needs a GPU"
    if dtype not in _HALF:
        return f"it computes in 16 bits, and the model in {str(dtype).removeprefix('torch.')}"
    capability = torch.cuda.get_device_capability(weight.device)
    if capability < _CAPABILITY:
        has, least = (".".join(map(str, version)) for version in (capability, _CAPABILITY))
        return f"the GPU has compute capability {has}, and it needs {least}"
    return None


def failure_reason(scorer: TokenScorer, longest: int | None = None) -> str | None:
    """Try the kernel with this scorer's model. Return why it does not work, or None if it does."""
    try:
        error = max(
            kernel_error(scorer.model, scorer.autocast_dtype or scorer.model.dtype, window)
            for window in _WINDOWS
        )
        # The comparison is negated so that NaN fails too.
        if not error <= _TOLERANCE:
            return f"its results are off by {error:.2g} of their size"
        diff, bound = _model_error(scorer, longest)
    except RuntimeError as error_:
        if ran_out_of_memory(error_):
            raise
        return first_line(error_)
    return None if diff <= bound else f"log-probabilities would change by {diff:.2g}"


def _model_error(scorer: TokenScorer, longest: int | None) -> tuple[float, float]:
    """Return the largest change of a log-probability in nats, and the change that is rounding."""
    model, dtype = scorer.model, scorer.autocast_dtype
    with trial.conditions(model, longest):
        tokens = trial.batch(model)
        plain, tried = (TokenScorer(model, autocast_dtype=dtype) for _ in range(2))
        tried.varlen = True
        actual, rounded = tried(*tokens).log_probs, plain(*tokens).log_probs
        with Upcast(torch.float32):
            exact = TokenScorer(model)(*tokens).log_probs
    diff, rounding = (float((rounded - other).abs().max()) for other in (actual, exact))
    return diff, _ROUNDINGS * rounding + trial.TOLERANCE


def kernel_error(model: PreTrainedModel, dtype: torch.dtype, window: int | None) -> float:
    """Return the largest error of the kernel's results and gradients on random numbers.

    Args:
        model: model whose device and size of heads are used.
        dtype: dtype of the kernel.
        window: size of a sliding window, or None.

    Returns:
        Norm of the error as a share of the norm of the result, at most over output and three gradients.
    """
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    size = config.to_dict().get("head_dim") or config.hidden_size // heads
    shared = heads // (config.to_dict().get("num_key_value_heads") or heads)
    device = model.device
    layout, seen = _example(window, device)
    generator = torch.Generator().manual_seed(0)
    N = layout.ids.shape[1]
    query, key, value, above = (
        torch.randn(1, H, N, size, generator=generator).to(dtype).to(device)
        for H in (2 * shared, 2, 2, 2 * shared)
    )
    with torch.enable_grad():
        q, k, v = ours = tuple(x.detach().requires_grad_(True) for x in (query, key, value))
        output = varlen.attend(q, k, v, layout, window, None, dtype).transpose(1, 2)
        mine = [output.detach(), *torch.autograd.grad(output, ours, above)]
        q, k, v = theirs = tuple(x.detach().float().requires_grad_(True) for x in (query, key, value))
        expected = _plain(q, k, v, seen, shared)
        right = [expected.detach(), *torch.autograd.grad(expected, theirs, above.float())]
    return max(
        float((part.float() - other).norm() / other.norm()) for part, other in zip(mine, right, strict=True)
    )


def _example(window: int | None, device: torch.device) -> tuple[VarlenLayout, Tensor]:
    """Return a layout of ragged groups, and who sees whom in its row, bool ``[N, N]``."""
    responses = torch.tensor(_RESPONSES)
    (P, G), L, T = responses.shape, max(_PROMPTS), int(responses.max()) + 1
    prompt_mask = torch.arange(L) >= L - torch.tensor(_PROMPTS)[:, None]
    # The last token of a response is not in the row.
    mask = torch.arange(T) <= responses[..., None]
    ids = torch.zeros(P, L, dtype=torch.int64), torch.zeros(P, G, T, dtype=torch.int64)
    layout = VarlenLayout(ids[0], prompt_mask, ids[1], mask, device)
    group: list[int] = []
    response: list[int] = []
    position: list[int] = []
    for p, length in enumerate(_PROMPTS):
        group += [p] * length
        response += [-1] * length
        position += range(length)
    for p, row in enumerate(_RESPONSES):
        for g, count in enumerate(row):
            group += [p] * count
            response += [g] * count
            position += range(_PROMPTS[p], _PROMPTS[p] + count)
    of_group, of_response, place = (torch.tensor(x) for x in (group, response, position))
    distance = place[:, None] - place
    own = (of_response[:, None] == of_response) | (of_response == -1)
    seen = (of_group[:, None] == of_group) & own & (distance >= 0)
    if window is not None:
        seen &= distance < window
    return layout, seen.to(device)


def _plain(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, shared: int) -> Tensor:
    """Attention ``[1, H, N, D]`` written out, where ``shared`` query heads share a key head."""
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    scores = query @ key.mT * query.shape[-1] ** -0.5
    shares: Tensor = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return shares @ value
