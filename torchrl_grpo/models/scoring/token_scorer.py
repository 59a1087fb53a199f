"""Log-probability and entropy of every response token under a causal language model.

A group's prompt is run once for all its responses (:mod:`~torchrl_grpo.models.scoring.shared_prefix`). Logits
are computed for response tokens only, one block at a time (:mod:`~torchrl_grpo.models.scoring.head`).

Axes: ``P`` prompts, ``G`` responses per prompt, ``L`` prompt tokens, ``T`` response tokens, ``V`` size of the
vocabulary, ``H`` hidden size, ``M`` real response tokens, ``S`` scored response tokens, ``K`` candidates for
the place of a token.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchrl_grpo.models.pictures import PictureInputs, PictureProcessor
from torchrl_grpo.models.precision import autocast
from torchrl_grpo.models.scoring import fused_head, picture_states, shared_prefix
from torchrl_grpo.models.scoring.head import (
    HeadOptions,
    linear,
    postprocess_logits,
    score_tokens,
    top_tokens,
)
from torchrl_grpo.models.scoring.padding import split_files, whole_rows
from torchrl_grpo.models.scoring.scores import (
    CandidateScores,
    Places,
    TokenScores,
    TopScores,
    scatter,
    targets_of,
)
from torchrl_grpo.models.scoring.transfer import upload_packed
from torchrl_grpo.models.scoring.varlen import VarlenLayout
from torchrl_grpo.models.shards import in_zero_shards

# Configuration keys of factors that models apply to their logits after the output head.
_FACTORS = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
_CAPS = ("final_logit_softcapping", "logits_soft_cap")
# Granite divides by logits_scaling. These model types multiply by it.
_LOGITS_SCALING_MULTIPLIES = ("hyperclovax",)


class TokenScorer(nn.Module):
    """Scores responses with ``model`` at ``temperature``.

    Args:
        model: causal language model with a backbone and a linear output head.
        temperature: sampling temperature of the engine, by which logits are divided.
        autocast_dtype: dtype of matrix products; None for the dtype of the weights.
        shares_prefix: whether each prompt is run once per group. False runs it once per response.
        block_elements: number of logits in memory at a time; None chooses by device.
        entropy_gradient: whether gradients flow through the entropy.
        head_dtype: dtype of the output head's products; None for ``autocast_dtype``, or for the dtype of the
            weights if that is None too.
        pictures: processor of a model for pictures and text; None for text alone.

    Attributes:
        fused_head: whether :mod:`~torchrl_grpo.models.scoring.fused_head` computes the head;
            :meth:`fuse_head` sets it.
        varlen: whether :mod:`~torchrl_grpo.models.scoring.varlen` computes the attention over shared
            prompts; :func:`~torchrl_grpo.models.scoring.varlen_choice.choose_attention` sets it.
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
        pictures: PictureProcessor | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.pictures = pictures
        self.temperature = temperature
        self.autocast_dtype = autocast_dtype
        self.block_elements = block_elements
        self.entropy_gradient = entropy_gradient
        self.head_dtype = head_dtype
        self.fused_head = False
        self.varlen = False
        self.shares_prefix = shares_prefix and _enable_shared_prefix(model)

    def forward(
        self,
        prompt: Tensor,
        prompt_mask: Tensor,
        response: Tensor,
        response_mask: Tensor,
        scored_mask: Tensor | None = None,
        candidates: Tensor | None = None,
        files: Tensor | None = None,
        file_sizes: Tensor | None = None,
    ) -> TokenScores | CandidateScores:
        """Score ``response`` given ``prompt``.

        Args:
            prompt: ``[P, L]`` int64, padded on the left.
            prompt_mask: ``[P, L]`` bool, True on real tokens.
            response: ``[P, G, T]`` int64, padded on the right; the end token belongs to the response.
            response_mask: ``[P, G, T]`` bool, True on real tokens.
            scored_mask: ``[P, G, T]`` bool, True on the real tokens whose scores are needed; None for all.
                The output head is computed for these only. The scores of the others are 0.
            candidates: ``[P, G, K, T]`` int64, tokens that are scored too in the place of each token.
            files: encoded pictures of each prompt in one row, ``[P, B]`` uint8; None for text alone.
            file_sizes: number of bytes of each picture, ``[P, K]`` int64, 0 after the last.

        Returns:
            :class:`TokenScores`, each ``[P, G, T]``, or with candidates :class:`CandidateScores`.
        """
        hidden, index = self._hidden_states(
            prompt, prompt_mask, response, response_mask, scored_mask, candidates, files, file_sizes
        )
        log_probs, entropy = self._score(hidden, index.targets if index.columns == 1 else index.by_column())
        entropy = scatter(entropy, index.places, response.shape)
        if candidates is None:
            return TokenScores(scatter(log_probs, index.places, response.shape), entropy)
        columns = scatter(log_probs, index.places, response.shape)
        return CandidateScores(columns[:, :, 0], entropy, columns[:, :, 1:])

    @torch.no_grad()
    def top_tokens(
        self,
        prompt: Tensor,
        prompt_mask: Tensor,
        response: Tensor,
        response_mask: Tensor,
        scored_mask: Tensor | None,
        *,
        count: int,
        vocabulary: int | None = None,
    ) -> TopScores:
        """Score ``response``, and find and score the most probable tokens for the place of each token.

        Args:
            prompt: see :meth:`forward`, also for the next four.
            prompt_mask: ``[P, L]``.
            response: ``[P, G, T]``.
            response_mask: ``[P, G, T]``.
            scored_mask: ``[P, G, T]`` or None.
            count: number of candidates K.
            vocabulary: candidates have smaller ids; None for all that the model has.
        """
        hidden, index = self._hidden_states(prompt, prompt_mask, response, response_mask, scored_mask)
        head, options = output_head(self.model), self._head_options()
        bias = None if head.bias is None else head.bias[:vocabulary]
        ids = top_tokens(hidden, head.weight[:vocabulary], bias, options, count, self.block_elements)
        log_probs, _ = self._score(hidden, torch.cat([index.targets[:, None], ids], 1))
        columns = scatter(log_probs, index.places, response.shape)
        return TopScores(columns[:, :, 0], scatter(ids, index.places, response.shape), columns[:, :, 1:])

    def _hidden_states(
        self,
        prompt: Tensor,
        prompt_mask: Tensor,
        response: Tensor,
        response_mask: Tensor,
        scored_mask: Tensor | None,
        candidates: Tensor | None = None,
        files: Tensor | None = None,
        file_sizes: Tensor | None = None,
    ) -> tuple[Tensor, Places]:
        """Compute hidden states ``[S, H]`` of the scored tokens, see :meth:`forward`."""
        device = next(self.model.parameters()).device
        # Everything that depends on lengths is computed on the CPU, so that a GPU need not be waited for.
        prompt, prompt_mask, response, response_mask = (
            tensor.cpu() for tensor in (prompt, prompt_mask, response, response_mask)
        )
        scored = response_mask if scored_mask is None else scored_mask.cpu() & response_mask
        every = scored_mask is None or torch.equal(scored, response_mask)
        index = upload_packed(
            Places(
                targets=targets_of(response, scored, candidates),
                columns=1 if candidates is None else 1 + candidates.shape[2],
                places=scored.flatten().nonzero().squeeze(-1),
                among=None if every else scored[response_mask].nonzero().squeeze(-1),
            ),
            device,
        )
        with autocast(self.autocast_dtype, device):
            if files is not None and file_sizes is not None:
                assert self.pictures is not None, "a scorer of text was given pictures"
                hidden = picture_states.compute(
                    self.model,
                    backbone(self.model),
                    self.pictures,
                    self.shares_prefix,
                    prompt,
                    prompt_mask,
                    response,
                    response_mask,
                    split_files(files, file_sizes),
                )
            elif self.varlen:
                varlen_layout = VarlenLayout(prompt, prompt_mask, response, response_mask, device)
                hidden = shared_prefix.hidden_states(backbone(self.model), varlen_layout)
            elif self.shares_prefix:
                layout = shared_prefix.PrefixLayout(prompt, prompt_mask, response, response_mask, device)
                hidden = shared_prefix.hidden_states(backbone(self.model), layout)
            else:
                hidden = self._hidden_states_unshared(prompt, prompt_mask, response, response_mask)
        if index.among is not None:
            hidden = hidden.index_select(0, index.among)
        return hidden, index

    def next_token_log_probs(
        self, prompt: Tensor, prompt_mask: Tensor, files: Sequence[Sequence[bytes]] | None = None
    ) -> Tensor:
        """Compute log-probabilities ``[P, V]`` of the token after each left-padded prompt ``[P, L]``.

        The temperature is 1, because the result is used to compare two models. Compiled layers run as they
        are written: for a few prompts without gradients, each would be compiled once more.

        Args:
            prompt: ``[P, L]`` int64, padded on the left.
            prompt_mask: ``[P, L]`` bool, True on real tokens.
            files: encoded pictures of each prompt; None for text alone.
        """
        device = next(self.model.parameters()).device
        prompt, prompt_mask = prompt.to(device), prompt_mask.to(device)
        body, inputs = backbone(self.model), {"position_ids": _positions(prompt_mask)}
        if files is not None:
            assert self.pictures is not None, "a scorer of text was given pictures"
            inputs = PictureInputs(body, self.pictures, files).model_inputs(prompt, prompt_mask)
        with torch.compiler.set_stance("force_eager"), autocast(self.autocast_dtype, device):
            output = body(input_ids=prompt, attention_mask=prompt_mask.long(), use_cache=False, **inputs)
        logits = _logits(self.model, output.last_hidden_state[:, -1], self._head_options())
        return F.log_softmax(logits, dim=-1)

    def _hidden_states_unshared(
        self, prompt: Tensor, prompt_mask: Tensor, response: Tensor, mask: Tensor
    ) -> Tensor:
        """Compute hidden states ``[M, H]`` of response tokens, with one copy of the prompt per response.

        All arguments are on the CPU.
        """
        device = next(self.model.parameters()).device
        ids, attention, before = whole_rows(prompt, prompt_mask, response, mask)
        shape = ids.shape
        ids, attention, before = upload_packed((ids.flatten(), attention.long().flatten(), before), device)
        attention = attention.view(shape)
        output = backbone(self.model)(
            input_ids=ids.view(shape),
            attention_mask=attention,
            position_ids=_positions(attention),
            use_cache=False,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden.flatten(0, 1).index_select(0, before)

    def _score(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Compute log-probabilities of ``targets``, ``[S]`` or ``[S, 1 + K]``, and entropies ``[S]``."""
        head, options = output_head(self.model), self._head_options()
        if self.fused_head and len(targets) and targets.dim() == 1:
            return fused_head.score_tokens(hidden, targets, head.weight, options)
        return score_tokens(hidden, targets, head.weight, head.bias, options, self.block_elements)

    def _head_options(self) -> HeadOptions:
        dtype = self.head_dtype or self.autocast_dtype or output_head(self.model).weight.dtype
        scale, softcap = _scale(self.model), _softcap(self.model)
        blocked = () if self.pictures is None else self.pictures.blocked
        return HeadOptions(self.temperature, softcap, dtype, self.entropy_gradient, scale, blocked)

    def fuse_head(self) -> None:
        """Use Liger's fused kernel if it supports this head. Warn if it fails or its results are wrong."""
        head, options = output_head(self.model), self._head_options()
        if not fused_head.supports(head.weight, head.bias, options):
            return
        reason = fused_head.failure_reason(head.weight, options)
        self.fused_head = reason is None
        if reason is not None:
            warnings.warn(
                f"train_model.fused_head=true: Liger's kernel is not used ({reason}); the head is computed "
                "in blocks",
                stacklevel=2,
            )


def _positions(mask: Tensor) -> Tensor:
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def backbone(model: PreTrainedModel) -> nn.Module:
    """Return the part of ``model`` that computes the last hidden state, without the output head.

    Raises:
        ValueError: the backbone is not a separate module.
    """
    base: nn.Module = model.base_model
    if base is model:
        # Llama 4's text-only model names a base module that only its multimodal model has.
        base = dict(model.named_children()).get("model", model)
    if base is model:
        raise ValueError("its backbone is not a separate module")
    return base


def output_head(model: PreTrainedModel) -> nn.Linear:
    """Return the layer that maps hidden states to logits.

    Raises:
        ValueError: the layer is not a single matrix product.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ValueError(f"its output head is a {type(head).__name__}, not a linear layer")
    return head


class _CastHead(nn.Linear):
    """An output head that casts its operands to ``dtype`` and returns logits in ``dtype``."""

    def __init__(self, head: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__(head.in_features, head.out_features, head.bias is not None, device="meta")
        self.weight, self.bias, self.dtype = head.weight, head.bias, dtype
        self.train(head.training)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.dtype == torch.float32 and hidden.is_cuda and hidden.dtype == self.weight.dtype:
            # A kernel that adds 16-bit products in float32 needs no copy of the weights.
            logits = linear(hidden.flatten(0, -2), self.weight, self.bias)
            return logits.view(*hidden.shape[:-1], -1)
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return F.linear(hidden.to(self.dtype), self.weight.to(self.dtype), bias)


def set_head_compute_dtype(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Make the model's own forward pass compute its logits in ``dtype``, including scale and cap.

    Parameters, their names and their ties do not change.

    Raises:
        ValueError: the head is not a single matrix product, or cannot be replaced.
    """
    head = _CastHead(output_head(model), dtype)
    model.set_output_embeddings(head)
    if output_head(model) is not head:
        raise ValueError("its output head cannot be replaced")


def _softcap(model: PreTrainedModel) -> float | None:
    settings = model.config.get_text_config().to_dict()
    caps = [settings[name] for name in _CAPS if settings.get(name) is not None]
    return float(caps[0]) if caps else None


def _scale(model: PreTrainedModel) -> float:
    """Return the factor that the model multiplies its logits by, before any cap.

    :func:`max_logit_error` verifies it.
    """
    config = model.config.get_text_config()
    settings = config.to_dict()
    scale = 1.0
    for name in _FACTORS:
        if isinstance(value := settings.get(name), int | float):
            divides = name == "logits_scaling" and config.model_type not in _LOGITS_SCALING_MULTIPLIES
            scale *= 1 / value if divides else value
    return scale


def _logits(model: PreTrainedModel, hidden: Tensor, options: HeadOptions) -> Tensor:
    """Compute float32 logits ``[..., V]`` at temperature 1 from hidden states ``[..., H]``."""
    head = output_head(model)
    weight = head.weight
    if options.dtype.itemsize > weight.dtype.itemsize:
        bias = None if head.bias is None else head.bias.to(options.dtype)
        return postprocess_logits(F.linear(hidden.to(options.dtype), weight.to(options.dtype), bias), options)
    if weight.is_cuda and not in_zero_shards(weight):
        bias = None if head.bias is None else head.bias.to(options.dtype)
        return postprocess_logits(linear(hidden.to(options.dtype), weight.to(options.dtype), bias), options)
    # Call the module, whose hooks gather sharded weights.
    with autocast(options.dtype if options.dtype != weight.dtype else None, weight.device):
        return postprocess_logits(head(hidden.to(weight.dtype)), options)


def _enable_shared_prefix(model: PreTrainedModel) -> bool:
    reason = shared_prefix.enable(model)
    if reason is not None:
        warn_about_prefix(model, reason)
    return reason is None


def warn_about_prefix(model: PreTrainedModel, reason: str) -> None:
    """Warn that prompts of ``model`` are run once per response, with the reason."""
    warnings.warn(
        f"{type(model).__name__}: prompts are run once per response instead of once per group, "
        f"because {reason}",
        stacklevel=4,
    )


def max_logit_error(model: PreTrainedModel) -> float:
    """Return the largest difference between the model's own logits and those of :class:`TokenScorer`.

    It is measured on a few tokens, and detects a model whose forward pass does more than backbone, head,
    scale and cap. Such a model would otherwise give a wrong loss.

    Raises:
        ValueError: the head is not a single matrix product.
    """
    head = output_head(model)
    device = head.weight.device
    ids = torch.arange(1, 9, device=device)[None] % model.config.get_text_config().vocab_size
    with torch.no_grad():
        own = model(input_ids=ids, use_cache=False).logits[0].float()
        hidden = backbone(model)(input_ids=ids, use_cache=False).last_hidden_state[0]
        options = HeadOptions(softcap=_softcap(model), dtype=head.weight.dtype, scale=_scale(model))
        # Use the head's weight alone, as scoring does. If the module's own forward pass does more than this
        # product, that must show as a difference.
        ours = postprocess_logits(F.linear(hidden.to(options.dtype), head.weight, head.bias), options)
    return float((own - ours).abs().max())
