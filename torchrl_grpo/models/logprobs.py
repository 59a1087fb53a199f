"""Log-probability and entropy of every response token under a causal language model.

A group's prompt is run once: its key/value states are repeated for the responses of the group, and
the gradients of all of them add up in the shared prompt. The vocabulary's logits exist for response
tokens only, a chunk at a time. Left out: packing under a token budget and fused GPU kernels.

Axes: ``P`` prompts, ``G`` responses of a prompt, ``L`` prompt tokens, ``T`` response tokens, ``V`` words.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel

from torchrl_grpo.models.precision import autocast


class TokenScores(NamedTuple):
    """What a model says about responses; entries where the response mask is False are zero.

    Attributes:
        log_probs: ``[P, G, T]`` float32, natural logarithm, at the sampling temperature.
        entropy: ``[P, G, T]`` float32, nats, no gradient.
    """

    log_probs: Tensor
    entropy: Tensor


class TokenScorer(nn.Module):
    """Scores responses with ``model`` at ``temperature``.

    Args:
        model: a causal language model with a backbone and an output head.
        temperature: logits are divided by it, as the engine did when it sampled.
        autocast_dtype: dtype of matrix products, None for the weights' own.
        shared_prefix: run each prompt once per group; False runs it once per response.
        chunk_tokens: how many response tokens have their full-vocabulary logits in memory at a time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        temperature: float = 1.0,
        autocast_dtype: torch.dtype | None = None,
        shared_prefix: bool = True,
        chunk_tokens: int = 1024,
    ) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.autocast_dtype = autocast_dtype
        self.chunk_tokens = chunk_tokens
        self.shared_prefix = shared_prefix and _can_share_prefix(model)

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
            hidden = (self._hidden_shared if self.shared_prefix else self._hidden_plain)(
                prompt, prompt_mask, response, response_mask
            )
            log_probs, entropy = self._score(hidden[response_mask], response[response_mask])
        zeros = torch.zeros(response.shape, device=device)
        return TokenScores(
            zeros.masked_scatter(response_mask, log_probs), zeros.masked_scatter(response_mask, entropy)
        )

    def next_token_log_probs(self, prompt: Tensor, prompt_mask: Tensor) -> Tensor:
        """Log-probabilities ``[P, V]`` of the token after each left-padded prompt ``[P, L]``."""
        device = next(self.model.parameters()).device
        prompt, prompt_mask = prompt.to(device), prompt_mask.to(device)
        with autocast(self.autocast_dtype, device):
            output = self.model(
                input_ids=prompt,
                attention_mask=prompt_mask.long(),
                position_ids=_positions(prompt_mask),
                logits_to_keep=1,
                use_cache=False,
            )
        return F.log_softmax(output.logits[:, -1].float() / self.temperature, dim=-1)

    def _hidden_shared(self, prompt: Tensor, prompt_mask: Tensor, response: Tensor, mask: Tensor) -> Tensor:
        """Hidden states ``[P, G, T, H]`` that predict each response token, each prompt run once."""
        P, (_, G, T) = prompt.shape[0], response.shape
        cache = DynamicCache(config=self.model.config)
        prefix = self.model.base_model(
            input_ids=prompt,
            attention_mask=prompt_mask.long(),
            position_ids=_positions(prompt_mask),
            past_key_values=cache,
            use_cache=True,
        )
        # Left padding puts the last prompt token, which predicts the first response token, at -1.
        first = prefix.last_hidden_state[:, -1].view(P, 1, 1, -1).expand(P, G, 1, -1)
        if T == 1:
            return first
        cache.batch_repeat_interleave(G)
        lengths = prompt_mask.sum(-1).repeat_interleave(G)
        rest = self.model.base_model(
            input_ids=response[..., :-1].reshape(P * G, T - 1),
            attention_mask=torch.cat(
                [prompt_mask.repeat_interleave(G, 0), mask[..., :-1].reshape(P * G, T - 1)], dim=1
            ).long(),
            position_ids=lengths[:, None] + torch.arange(T - 1, device=prompt.device),
            past_key_values=cache,
            use_cache=True,
        )
        return torch.cat([first, rest.last_hidden_state.view(P, G, T - 1, -1)], dim=2)

    def _hidden_plain(self, prompt: Tensor, prompt_mask: Tensor, response: Tensor, mask: Tensor) -> Tensor:
        """The same hidden states with each response carrying its own prompt."""
        (P, L), (_, G, T) = prompt.shape, response.shape
        ids = torch.cat([prompt.repeat_interleave(G, 0), response.reshape(P * G, T)], dim=1)
        attention = torch.cat([prompt_mask.repeat_interleave(G, 0), mask.reshape(P * G, T)], dim=1)
        output = self.model.base_model(
            input_ids=ids,
            attention_mask=attention.long(),
            position_ids=_positions(attention),
            use_cache=False,
        )
        return output.last_hidden_state[:, L - 1 : -1].view(P, G, T, -1)

    def _score(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy ``[N]`` of ``targets [N]`` from hidden states ``[N, H]``."""
        pieces = list(zip(hidden.split(self.chunk_tokens), targets.split(self.chunk_tokens), strict=True))
        # A single chunk fits in memory anyway; more are recomputed in the backward pass, one at a time.
        recompute = len(pieces) > 1 and torch.is_grad_enabled()
        scores = [
            checkpoint(self._score_chunk, h, t, use_reentrant=False) if recompute else self._score_chunk(h, t)
            for h, t in pieces
        ]
        return torch.cat([s[0] for s in scores]), torch.cat([s[1] for s in scores])

    def _score_chunk(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = _head_logits(self.model, hidden).float() / self.temperature
        normaliser = logits.logsumexp(-1)
        log_probs = logits.gather(-1, targets[:, None]).squeeze(-1) - normaliser
        with torch.no_grad():
            probabilities = (logits - normaliser[:, None]).exp()
            entropy = normaliser - (probabilities * logits).sum(-1)
        return log_probs, entropy


def _positions(mask: Tensor) -> Tensor:
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def _head_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """What the model's own forward does after its backbone, for hidden states ``[N, H]``."""
    logits = model.get_output_embeddings()(hidden)
    cap = model.config.get_text_config().to_dict().get("final_logit_softcapping")
    return logits if cap is None else torch.tanh(logits / cap) * cap


def _can_share_prefix(model: PreTrainedModel) -> bool:
    config = model.config.get_text_config()
    settings = config.to_dict()
    one_kind = "full_attention" if settings.get("sliding_window") is None else "sliding_attention"
    kinds = set(settings.get("layer_types") or [one_kind])
    reason = None
    if model.is_gradient_checkpointing:
        reason = "gradient checkpointing turns the key/value cache off"
    elif kinds != {"full_attention"}:
        reason = f"its layers are {', '.join(sorted(kinds))}"
    if reason is not None:
        warnings.warn(
            f"{type(model).__name__}: prompts are run once per response instead of once per group, "
            f"because {reason}",
            stacklevel=3,
        )
    return reason is None


def check_head(model: PreTrainedModel) -> float:
    """Largest gap between the model's own logits and those :class:`TokenScorer` computes, on a few tokens.

    A model whose forward does more than backbone and head (logit scaling, say) shows up here
    instead of in a wrong loss.
    """
    device = next(model.parameters()).device
    ids = torch.arange(1, 9, device=device)[None] % model.config.get_text_config().vocab_size
    with torch.no_grad():
        own = model(input_ids=ids, use_cache=False).logits[0].float()
        ours = _head_logits(
            model, model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        ).float()
    return float((own - ours).abs().max())
