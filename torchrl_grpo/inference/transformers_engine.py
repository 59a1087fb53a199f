"""Generation with plain transformers: works wherever torch does, and is the numerical reference.

A batch of prompts is prefilled once and its cache repeated for the samples of each prompt; sampling
draws from a generator per sample, so a response depends on its seed and on nothing generated before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from torchrl_grpo.inference.protocol import Completion, Engine, NextTokens, Sampling
from torchrl_grpo.padding import pad_left


class TransformersEngine(Engine):
    """An engine around ``model``, which it owns: nobody else may train or change it.

    Args:
        model: a causal language model.
        end_ids: tokens that end a response.
        pad_id: fills the left of short prompts; masked, so any id will do.
        max_rows: responses generated at a time.
    """

    def __init__(
        self, model: PreTrainedModel, end_ids: Sequence[int], pad_id: int, max_rows: int = 256
    ) -> None:
        self.model = model
        self.end_ids = torch.tensor(list(end_ids))
        self.pad_id = pad_id
        self.max_rows = max_rows
        self._device = next(model.parameters()).device
        self._asleep = False

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        """See :meth:`Engine.generate`."""
        assert not self._asleep, "generate() on a sleeping engine: wake it and load weights first"
        per_call = max(1, self.max_rows // sampling.num_samples)
        results: list[list[Completion]] = []
        for start in range(0, len(prompts), per_call):
            chosen = slice(start, start + per_call)
            seeds = None if sampling.seeds is None else sampling.seeds[chosen]
            results.extend(self._generate(prompts[chosen], sampling, seeds))
        return results

    @torch.no_grad()
    def _generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int] | None
    ) -> list[list[Completion]]:
        G = sampling.num_samples
        rows = len(prompts) * G
        ids, mask = (t.to(self._device) for t in pad_left(prompts, self.pad_id))
        cache = DynamicCache(config=self.model.config)
        logits = self._step(ids, mask, (mask.long().cumsum(-1) - 1).clamp(min=0), cache).repeat_interleave(
            G, 0
        )
        cache.batch_repeat_interleave(G)
        mask = mask.repeat_interleave(G, 0)
        position = mask.sum(-1)
        end_ids = self.end_ids.to(self._device)
        generators = _generators(seeds, G)
        tokens: list[Tensor] = []
        log_probs: list[Tensor] = []
        running = torch.ones(rows, dtype=torch.bool, device=self._device)
        for index in range(sampling.max_new_tokens):
            log_p = torch.log_softmax(logits.float() / (sampling.temperature or 1.0), dim=-1)
            token = log_p.argmax(-1) if sampling.temperature == 0 else _sample(log_p, generators)
            tokens.append(token)
            log_probs.append(log_p.gather(-1, token[:, None]).squeeze(-1))
            running = running & ~torch.isin(token, end_ids)
            if not running.any() or index + 1 == sampling.max_new_tokens:
                break
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            logits = self._step(token[:, None], mask, position[:, None], cache)
            position = position + 1
        return _unpack(torch.stack(tokens, 1), torch.stack(log_probs, 1), end_ids, len(prompts), G)

    def _step(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        output = self.model(
            input_ids=ids,
            attention_mask=mask.long(),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    @torch.no_grad()
    def next_tokens(self, prompts: Sequence[Sequence[int]], top_k: int) -> NextTokens:
        """See :meth:`Engine.next_tokens`."""
        ids, mask = (t.to(self._device) for t in pad_left(prompts, self.pad_id))
        logits = self._step(
            ids, mask, (mask.long().cumsum(-1) - 1).clamp(min=0), DynamicCache(config=self.model.config)
        )
        top = torch.log_softmax(logits.float(), -1).topk(min(top_k, logits.shape[-1]), dim=-1)
        return NextTokens(top.indices.cpu(), top.values.cpu(), cached_tokens=0)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See :meth:`Engine.load_weights`."""
        self.wake()
        own = dict(self.model.named_parameters())
        for name, tensor in weights:
            own[name].copy_(tensor)

    def reset_cache(self) -> None:
        """Nothing to forget: each call builds its own cache."""

    def sleep(self) -> None:
        """See :meth:`Engine.sleep`."""
        if self._asleep:
            return
        buffers = dict(self.model.named_buffers())
        self._buffers = {name: buffer.clone() for name, buffer in buffers.items()}
        self.model.to("meta")
        self._asleep = True

    def wake(self) -> None:
        """See :meth:`Engine.wake`."""
        if not self._asleep:
            return
        self.model.to_empty(device=self._device)
        # Moving to the meta device and back gave each name a tensor of its own.
        self.model.tie_weights()
        own = dict(self.model.named_buffers())
        for name, buffer in self._buffers.items():
            own[name].copy_(buffer)
        self._asleep = False

    def close(self) -> None:
        """See :meth:`Engine.close`."""
        del self.model


def _generators(seeds: Sequence[int] | None, num_samples: int) -> list[torch.Generator]:
    if seeds is None:
        return []
    # Sampling happens on the CPU, so one seed means the same draw on every device.
    return [torch.Generator().manual_seed(seed + sample) for seed in seeds for sample in range(num_samples)]


def _sample(log_p: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """One draw per row by the exponential race: argmax of p / E with E ~ Exp(1)."""
    if not generators:
        noise = torch.empty_like(log_p).exponential_()
    else:
        noise = torch.stack([torch.empty(log_p.shape[-1]).exponential_(generator=g) for g in generators])
    return (log_p - noise.to(log_p.device).log()).argmax(-1)


def _unpack(tokens: Tensor, log_probs: Tensor, end_ids: Tensor, P: int, G: int) -> list[list[Completion]]:
    """Cut each row after its first end token."""
    is_end = torch.isin(tokens, end_ids)
    lengths = torch.where(is_end.any(1), is_end.long().argmax(1) + 1, tokens.shape[1]).tolist()
    stopped = is_end.any(1).tolist()
    rows = [
        Completion(row[:length], values[:length], "stop" if stop else "length")
        for row, values, length, stop in zip(
            tokens.tolist(), log_probs.tolist(), lengths, stopped, strict=True
        )
    ]
    return [rows[p * G : (p + 1) * G] for p in range(P)]
