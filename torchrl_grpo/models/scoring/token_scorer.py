"""Log-probability and entropy of every response token under a causal language model.

A group's prompt is run once for all its responses (:mod:`~torchrl_grpo.models.scoring.shared_prefix`), and
the vocabulary's logits exist for response tokens only, a block at a time
(:mod:`~torchrl_grpo.models.scoring.head`).

Axes: ``P`` prompts, ``G`` responses of a prompt, ``L`` prompt tokens, ``T`` response tokens, ``V`` words.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchrl_grpo.models.precision import autocast
from torchrl_grpo.models.scoring import fused_head, shared_prefix
from torchrl_grpo.models.scoring.head import HeadOptions, finished_logits, score_tokens

# What models multiply their logits by, after the product with the output head.
_FACTORS = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
_CAPS = ("final_logit_softcapping", "logits_soft_cap")
# Granite, whose name it is, divides.
_LOGITS_SCALING_MULTIPLIES = ("hyperclovax",)


class TokenScores(NamedTuple):
    """What a model says about responses; entries where the response mask is False are zero.

    Attributes:
        log_probs: ``[P, G, T]`` float32, natural logarithm, at the sampling temperature.
        entropy: ``[P, G, T]`` float32, nats; with a gradient only if the scorer was told to.
    """

    log_probs: Tensor
    entropy: Tensor


class TokenScorer(nn.Module):
    """Scores responses with ``model`` at ``temperature``.

    Args:
        model: a causal language model with a backbone and a linear output head.
        temperature: logits are divided by it, as the engine did when it sampled.
        autocast_dtype: dtype of matrix products, None for the weights' own.
        shares_prefix: run each prompt once per group; False runs it once per response.
        block_elements: how many logits are in memory at a time; None chooses by device.
        entropy_gradient: let gradients flow through the entropy.
        head_dtype: dtype of the output head's products, None for ``autocast_dtype`` or else the weights' own.

    Attributes:
        fused_head: compute the head with :mod:`~torchrl_grpo.models.scoring.fused_head`; :meth:`fuse_head`
            decides.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        temperature: float = 1.0,
        autocast_dtype: torch.dtype | None = None,
        shares_prefix: bool = True,
        block_elements: int | None = None,
        entropy_gradient: bool = False,
        head_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.autocast_dtype = autocast_dtype
        self.block_elements = block_elements
        self.entropy_gradient = entropy_gradient
        self.head_dtype = head_dtype
        self.fused_head = False
        self.shares_prefix = shares_prefix and _can_share_prefix(model)

    def forward(
        self, prompt: Tensor, prompt_mask: Tensor, response: Tensor, response_mask: Tensor
    ) -> TokenScores:
        """Score ``response`` given ``prompt``.

        Args:
            prompt: ``[P, L]`` int64, padded on the left.
            prompt_mask: ``[P, L]`` bool, True on real tokens.
            response: ``[P, G, T]`` int64, padded on the right; the end token belongs to the response.
            response_mask: ``[P, G, T]`` bool, True on real tokens.

        Returns:
            :class:`TokenScores`, each ``[P, G, T]``.
        """
        device = next(self.model.parameters()).device
        prompt, prompt_mask = prompt.to(device), prompt_mask.to(device)
        response, response_mask = response.to(device), response_mask.to(device)
        with autocast(self.autocast_dtype, device):
            if self.shares_prefix:
                layout = shared_prefix.PrefixLayout(prompt, prompt_mask, response, response_mask)
                hidden = shared_prefix.hidden_states(backbone(self.model), layout)
            else:
                hidden = self._hidden_plain(prompt, prompt_mask, response, response_mask)
        log_probs, entropy = self._score(hidden, response[response_mask])
        zeros = torch.zeros(response.shape, device=device)
        return TokenScores(
            zeros.masked_scatter(response_mask, log_probs), zeros.masked_scatter(response_mask, entropy)
        )

    def next_token_log_probs(self, prompt: Tensor, prompt_mask: Tensor) -> Tensor:
        """Log-probabilities ``[P, V]`` of the token after each left-padded prompt ``[P, L]``.

        The temperature is 1: what is asked is whether two models are the same.
        """
        device = next(self.model.parameters()).device
        prompt, prompt_mask = prompt.to(device), prompt_mask.to(device)
        with autocast(self.autocast_dtype, device):
            output = backbone(self.model)(
                input_ids=prompt,
                attention_mask=prompt_mask.long(),
                position_ids=_positions(prompt_mask),
                use_cache=False,
            )
        logits = _logits(self.model, output.last_hidden_state[:, -1], self._head_options())
        return F.log_softmax(logits, dim=-1)

    def _hidden_plain(self, prompt: Tensor, prompt_mask: Tensor, response: Tensor, mask: Tensor) -> Tensor:
        """Hidden states ``[M, H]`` of the M response tokens, each response carrying its own prompt."""
        (P, L), (_, G, T) = prompt.shape, response.shape
        ids = torch.cat([prompt.repeat_interleave(G, 0), response.reshape(P * G, T)], dim=1)
        attention = torch.cat([prompt_mask.repeat_interleave(G, 0), mask.reshape(P * G, T)], dim=1)
        output = backbone(self.model)(
            input_ids=ids,
            attention_mask=attention.long(),
            position_ids=_positions(attention),
            use_cache=False,
        )
        return output.last_hidden_state[:, L - 1 : -1].view(P, G, T, -1)[mask]

    def _score(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy ``[M]`` of ``targets [M]`` from hidden states ``[M, H]``."""
        head, options = output_head(self.model), self._head_options()
        if self.fused_head and len(targets):
            return fused_head.score_tokens(hidden, targets, head.weight, options)
        return score_tokens(hidden, targets, head.weight, head.bias, options, self.block_elements)

    def _head_options(self) -> HeadOptions:
        dtype = self.head_dtype or self.autocast_dtype or output_head(self.model).weight.dtype
        scale, softcap = _scale(self.model), _softcap(self.model)
        return HeadOptions(self.temperature, softcap, dtype, self.entropy_gradient, scale)

    def fuse_head(self) -> None:
        """Take Liger's fused kernel for the head where it suits; warns where that does not work out."""
        head, options = output_head(self.model), self._head_options()
        if not fused_head.suits(head.weight, head.bias, options):
            return
        why = fused_head.why_not(head.weight, options)
        self.fused_head = why is None
        if why is not None:
            warnings.warn(
                f"train_model.fused_head=true: Liger's kernel is not used ({why}); the head is computed in "
                "blocks",
                stacklevel=2,
            )


def _positions(mask: Tensor) -> Tensor:
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def backbone(model: PreTrainedModel) -> nn.Module:
    """The part of ``model`` that ends with the last hidden state, before the output head.

    Raises:
        ValueError: it is no module of its own.
    """
    found: nn.Module = model.base_model
    if found is model:
        # Llama 4's text model names as its base a part that only the model with images has.
        found = dict(model.named_children()).get("model", model)
    if found is model:
        raise ValueError("its backbone is not a module of its own")
    return found


def output_head(model: PreTrainedModel) -> nn.Linear:
    """The layer that turns hidden states into logits.

    Raises:
        ValueError: it is not one matrix product.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ValueError(f"its output head is a {type(head).__name__}, not a linear layer")
    return head


class _HeadIn(nn.Linear):
    """An output head whose operands are cast, and whose logits stay, in ``dtype``."""

    def __init__(self, head: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__(head.in_features, head.out_features, head.bias is not None, device="meta")
        self.weight, self.bias, self.dtype = head.weight, head.bias, dtype
        self.train(head.training)

    def forward(self, hidden: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return F.linear(hidden.to(self.dtype), self.weight.to(self.dtype), bias)


def multiply_head_in(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Let the model's own forward compute its logits in ``dtype``, scale and cap included.

    Its parameters, names and ties stay as they are.

    Raises:
        ValueError: the head is not one matrix product, or another cannot take its place.
    """
    head = _HeadIn(output_head(model), dtype)
    model.set_output_embeddings(head)
    if output_head(model) is not head:
        raise ValueError("its output head cannot be replaced")


def _softcap(model: PreTrainedModel) -> float | None:
    settings = model.config.get_text_config().to_dict()
    caps = [settings[name] for name in _CAPS if settings.get(name) is not None]
    return float(caps[0]) if caps else None


def _scale(model: PreTrainedModel) -> float:
    """What the model multiplies its logits by, before a cap; :func:`check_head` compares with its forward."""
    config = model.config.get_text_config()
    settings = config.to_dict()
    scale = 1.0
    for name in _FACTORS:
        if isinstance(value := settings.get(name), int | float):
            divides = name == "logits_scaling" and config.model_type not in _LOGITS_SCALING_MULTIPLIES
            scale *= 1 / value if divides else value
    return scale


def _logits(model: PreTrainedModel, hidden: Tensor, options: HeadOptions) -> Tensor:
    """All logits ``[..., V]`` in float32, at temperature 1, of hidden states ``[..., H]``."""
    head = output_head(model)
    weight = head.weight
    if options.dtype.itemsize > weight.dtype.itemsize:
        bias = None if head.bias is None else head.bias.to(options.dtype)
        return finished_logits(F.linear(hidden.to(options.dtype), weight.to(options.dtype), bias), options)
    # Called as a module, which gathers weights that are in shards.
    with autocast(options.dtype if options.dtype != weight.dtype else None, weight.device):
        return finished_logits(head(hidden.to(weight.dtype)), options)


def _can_share_prefix(model: PreTrainedModel) -> bool:
    reason = shared_prefix.enable(model)
    if reason is not None:
        warn_about_prefix(model, reason)
    return reason is None


def warn_about_prefix(model: PreTrainedModel, reason: str) -> None:
    """Say once that, and why, prompts of ``model`` are run once per response."""
    warnings.warn(
        f"{type(model).__name__}: prompts are run once per response instead of once per group, "
        f"because {reason}",
        stacklevel=4,
    )


def check_head(model: PreTrainedModel) -> float:
    """Largest gap between the model's own logits and those :class:`TokenScorer` computes, on a few tokens.

    A model whose forward does more than backbone, head, scale and cap shows up here instead of in a wrong
    loss.

    Raises:
        ValueError: the head is not one matrix product.
    """
    head = output_head(model)
    device = head.weight.device
    ids = torch.arange(1, 9, device=device)[None] % model.config.get_text_config().vocab_size
    with torch.no_grad():
        own = model(input_ids=ids, use_cache=False).logits[0].float()
        hidden = backbone(model)(input_ids=ids, use_cache=False).last_hidden_state[0]
        options = HeadOptions(softcap=_softcap(model), dtype=head.weight.dtype, scale=_scale(model))
        # As it is scored, and not by calling the head, which may do more.
        ours = finished_logits(F.linear(hidden.to(options.dtype), head.weight, head.bias), options)
    return float((own - ours).abs().max())
