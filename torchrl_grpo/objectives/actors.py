"""Adapt the loss to the kinds of actors: their input keys, and the keys of their log-probabilities.

The project's own :class:`~torchrl_grpo.models.scoring.token_scorer.TokenScorer` takes tensors instead of a
TensorDict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor, nn

# Input of TorchRL's wrappers of language models when they score token ids.
FULL_TOKENS = ("tokens", "full")

# Prompt, its mask, response, its mask; of a TokenScorer, which tokens to score, and candidates too.
Inputs = tuple[Tensor, ...]


class ActorKeys(NamedTuple):
    """Output keys of an actor that is a ``TensorDictModule``.

    Attributes:
        log_prob: key of the log-probabilities of response tokens.
        full_log_prob: key of the log-probabilities of prompt and response in one row, for an actor that reads
            ``("tokens", "full")``.
        entropy: key of the entropies of response tokens. An actor need not write it.
    """

    log_prob: NestedKey
    full_log_prob: NestedKey
    entropy: NestedKey


def check_actor(actor: nn.Module) -> None:
    """Reject an actor that cannot score the token ids of a batch.

    Raises:
        ValueError: the actor generates, or reads text that would have to be tokenized again.
    """
    if not isinstance(actor, TensorDictModuleBase):
        return
    name = type(actor).__name__
    if getattr(actor, "generate", False) is True:
        raise ValueError(
            f"The actor {name} generates responses instead of scoring them; build it with generate=False"
        )
    for key in actor.in_keys:
        if isinstance(key, tuple) and key[0] in ("text", "history"):
            raise ValueError(
                f"The actor {name} reads {key}, but tokenizing text again may not give the tokens that were "
                "sampled; build it with input_mode='tokens'"
            )


def actor_in_keys(actor: nn.Module, scored: list[NestedKey]) -> list[NestedKey]:
    """Return the keys that a batch needs for ``actor`` to score it.

    Args:
        actor: actor of any kind.
        scored: keys of prompt, prompt mask, response and response mask.
    """
    if isinstance(actor, TensorDictModuleBase) and not _reads_rows(actor):
        return list(actor.in_keys)
    return scored


def score(
    actor: nn.Module,
    tensordict: TensorDictBase,
    inputs: Callable[[], Inputs],
    mask: Tensor,
    keys: ActorKeys,
    pictures: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Score the responses of a batch with an actor of any kind.

    Args:
        actor: a module called with four tensors, like a ``TokenScorer``; or a ``TensorDictModule`` that reads
            keys of the batch and writes ``keys.log_prob`` ``[P, G, T]``; or one that reads
            ``("tokens", "full")``, like TorchRL's ``TransformersWrapper``, and scores one row per response.
        tensordict: batch ``[P]``, which is not changed.
        inputs: function that returns prompt ``[P, L]``, its mask, response ``[P, G, T]`` and its mask.
        mask: ``[P, G, T]`` bool, True for tokens that the loss counts. Values elsewhere become zero.
        keys: output keys of the actor.
        pictures: further arguments of a ``TokenScorer`` of a model for pictures.

    Returns:
        Log-probabilities ``[P, G, T]``, entropies ``[P, G, T]`` in nats or None if the actor gives none, and
        log-probabilities ``[P, G, K, T]`` of candidates or None if ``inputs`` has none.

    Raises:
        ValueError: the log-probabilities are missing, or an output has the wrong shape.
    """
    if not isinstance(actor, TensorDictModuleBase):
        log_probs, entropy, *more = actor(*inputs(), **(pictures or {}))
        return log_probs, entropy, more[0] if more else None
    if _reads_rows(actor):
        return _score_rows(actor, inputs(), keys.full_log_prob), None, None
    written = actor(tensordict.select(*actor.in_keys))
    log_probs = written.get(keys.log_prob, None)
    entropy = written.get(keys.entropy, None)
    for name, output in ((keys.log_prob, log_probs), (keys.entropy, entropy)):
        if output is not None and output.shape != mask.shape:
            raise ValueError(
                f"The actor {type(actor).__name__} wrote {name!r} of shape {list(output.shape)}; the "
                f"responses have shape {list(mask.shape)}"
            )
    if log_probs is None:
        raise ValueError(
            f"The actor {type(actor).__name__} wrote no {keys.log_prob!r}; give it that out_key, or name its "
            "own with set_keys(actor_log_prob=...)"
        )
    # Such a module may write any value to padding.
    outside = ~mask.to(log_probs.device)
    log_probs = log_probs.masked_fill(outside, 0.0)
    return log_probs, None if entropy is None else entropy.masked_fill(outside, 0.0), None


def _reads_rows(actor: TensorDictModuleBase) -> bool:
    return FULL_TOKENS in actor.in_keys


def _score_rows(
    actor: TensorDictModuleBase,
    inputs: Inputs,
    key: NestedKey,
) -> Tensor:
    """Score with an actor that takes prompt and response as one unpadded row; returns ``[P, G, T]``."""
    prompt, prompt_mask, response, response_mask = inputs
    rows = []
    for ids, ids_mask, group, group_mask in zip(prompt, prompt_mask, response, response_mask, strict=True):
        for sample, sample_mask in zip(group, group_mask, strict=True):
            full = torch.cat([ids[ids_mask], sample[sample_mask]])
            mask = torch.ones_like(full, dtype=torch.bool)
            rows.append(TensorDict({"tokens": {"full": full}, "masks": {"all_attention_mask": mask}}))
    outputs = actor(lazy_stack(rows)).get(key, None, as_list=True)
    if outputs is None:
        raise ValueError(
            f"The actor {type(actor).__name__} wrote no {key!r}; name its own with "
            "set_keys(actor_full_log_prob=...)"
        )
    lengths = response_mask.sum(-1).flatten().tolist()
    # The response is at the end of the row, even if the actor padded the row on the left.
    parts = [row[len(row) - length :] for row, length in zip(outputs, lengths, strict=True)]
    log_probs = torch.cat(parts)
    zeros = log_probs.new_zeros(response.shape)
    return zeros.masked_scatter(response_mask.to(zeros.device), log_probs)
