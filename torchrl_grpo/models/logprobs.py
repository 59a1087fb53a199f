"""Log-probability and entropy of every response token under a causal language model.

A group's prompt is run once for all its responses, and the gradients of all of them add up in it: short
groups are packed into one row, long ones repeat the prompt's key/value states. The vocabulary's logits
exist for response tokens only, a chunk at a time. Left out: token budgets and fused GPU kernels.

Axes: ``P`` prompts, ``G`` responses of a prompt, ``L`` prompt tokens, ``T`` response tokens, ``V`` words.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
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
        entropy: ``[P, G, T]`` float32, nats; with a gradient only if the scorer was told to.
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
        max_packed_width: longest row a group is packed into, in tokens; longer groups repeat the prompt's
            key/value states. None is the model's hidden size.
        chunk_tokens: how many response tokens have their full-vocabulary logits in memory at a time.
        entropy_gradient: let gradients flow through the entropy.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        temperature: float = 1.0,
        autocast_dtype: torch.dtype | None = None,
        shared_prefix: bool = True,
        chunk_tokens: int = 1024,
        max_packed_width: int | None = None,
        entropy_gradient: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.autocast_dtype = autocast_dtype
        self.chunk_tokens = chunk_tokens
        self.entropy_gradient = entropy_gradient
        # Packed attention looks at S keys a token, 4 S H operations where the matrices take about 24 H^2.
        # Up to S = H that is cheap, and cheaper than padding and copies of the cache.
        hidden_size = model.config.get_text_config().hidden_size
        self.max_packed_width = hidden_size if max_packed_width is None else max_packed_width
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
            hidden = self._path(prompt, response_mask)(prompt, prompt_mask, response, response_mask)
            log_probs, entropy = self._score(hidden, response[response_mask])
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

    def _path(self, prompt: Tensor, mask: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """How to run the model: what shares the prompt at the least cost."""
        if not self.shared_prefix:
            return self._hidden_plain
        config = self.model.config.get_text_config()
        width = prompt.shape[1] + int(mask.sum((1, 2)).max())
        # Flash kernels take no mask of the form that packing needs.
        packs = config._attn_implementation in ("sdpa", "eager") and width <= self.max_packed_width
        return self._hidden_packed if packs else self._hidden_repeated

    def _hidden_packed(self, prompt: Tensor, prompt_mask: Tensor, response: Tensor, mask: Tensor) -> Tensor:
        """Hidden states ``[N, H]`` that predict the N response tokens, in the order ``mask`` lists them.

        One row a group: its prompt, then the tokens of its responses one after the other, without padding
        between them. Each response sees the prompt and itself, at the positions it would have alone.
        """
        (P, L), (_, G, T) = prompt.shape, response.shape
        device = prompt.device
        # A token is an input only if another one follows; the last one is only predicted.
        feeds = mask[..., 1:]
        counts = feeds.sum((1, 2))
        slots = torch.arange(int(counts.max()), device=device) < counts[:, None]
        prompt_length = prompt_mask.sum(-1)

        def pack(values: Tensor, fill: int) -> Tensor:
            packed = torch.full(slots.shape, fill, dtype=torch.int64, device=device)
            packed[slots] = values.expand(P, G, T - 1)[feeds]
            return packed

        ids = torch.cat([prompt, pack(response[..., :-1], 0)], dim=1)
        steps = torch.arange(T - 1, device=device)
        positions = torch.cat([_positions(prompt_mask), pack(prompt_length[:, None, None] + steps, 0)], dim=1)
        # 0 for the prompt, 1 to G for the responses, -1 for padding.
        owner = torch.cat(
            [prompt_mask.long() - 1, pack(torch.arange(1, G + 1, device=device)[None, :, None], -1)], dim=1
        )
        query, key = owner[:, :, None], owner[:, None, :]
        order = torch.arange(ids.shape[1], device=device)
        visible = (order[:, None] >= order) & ((key == 0) | (key == query)) & (key >= 0)
        # Padding sees itself: a row of nothing but masked entries would be NaN.
        visible = (visible | (order[:, None] == order))[:, None]
        if self.model.config.get_text_config()._attn_implementation == "eager":
            dtype = self.autocast_dtype or self.model.dtype
            visible = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill(
                ~visible, torch.finfo(dtype).min
            )
        output = self.model.base_model(
            input_ids=ids, attention_mask=visible, position_ids=positions, use_cache=False
        )
        # The first token is predicted at the prompt's end, token t at the slot of token t - 1.
        source = torch.full((P, G, T), L - 1, device=device)
        source[..., 1:] = L - 1 + feeds.reshape(P, -1).cumsum(-1).view(P, G, T - 1)
        rows = torch.arange(P, device=device)[:, None, None].expand(P, G, T)
        return output.last_hidden_state[rows[mask], source[mask]]

    def _hidden_repeated(self, prompt: Tensor, prompt_mask: Tensor, response: Tensor, mask: Tensor) -> Tensor:
        """The same from a prompt run once and its key/value states repeated for the responses."""
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
        hidden = prefix.last_hidden_state[:, -1].view(P, 1, 1, -1).expand(P, G, 1, -1)
        if T > 1:
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
            hidden = torch.cat([hidden, rest.last_hidden_state.view(P, G, T - 1, -1)], dim=2)
        return hidden[mask]

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
        return output.last_hidden_state[:, L - 1 : -1].view(P, G, T, -1)[mask]

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
        with torch.set_grad_enabled(self.entropy_gradient and torch.is_grad_enabled()):
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
