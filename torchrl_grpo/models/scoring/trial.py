"""A trial on a few tokens: is what is computed for a batch what the model says of each sequence by itself?

A model may take positions, windows or states from something that padding changes or that a row of groups does
not carry, and no list of names would be complete: it is measured. Every number is computed in float32 at
least, whatever the weights are in, and in float64 where float32 leaves a doubt, so that a difference means
another function and not rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.models.scoring.upcast import Upcast

# In nats. Rounding of float32 is 2e-6 in small models and some 1e-5 in real ones.
TOLERANCE = 1e-4
# Of two groups. The longest of each is longer than the windows of a trial, the shortest as short as can be.
_PROMPTS = (4, 9)
_RESPONSES = ((12, 5), (1, 8))
# How far a token sees, as transformers' models name it in configurations and modules.
_WINDOWS = (
    "sliding_window",
    "sliding_window_size",
    "attention_window_size",
    "window_size",
    "attention_chunk_size",
    "index_topk",
)
# Of them in a trial.
_NARROW = 4


def batch(model: PreTrainedModel) -> tuple[Tensor, ...]:
    """Ragged groups as a scorer takes them, of tokens from the ordinary part of the vocabulary."""
    settings = model.config.get_text_config().to_dict()
    size = settings["vocab_size"]
    special = {0, 1, 2}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = settings.get(name)
        special |= set(ids if isinstance(ids, list) else [ids])
    # Special tokens, which nothing may have trained, are the first or the last of a vocabulary.
    ordinary = torch.tensor([i for i in range(size // 64, size // 2) if i not in special])
    generator = torch.Generator().manual_seed(0)
    responses = torch.tensor(_RESPONSES)
    (P, G), L, T = responses.shape, max(_PROMPTS), int(responses.max())
    ids = ordinary[torch.randint(len(ordinary), (P * (L + G * T),), generator=generator)]
    prompt, response = ids[: P * L].view(P, L), ids[P * L :].view(P, G, T)
    prompt_mask = torch.arange(L) >= L - torch.tensor(_PROMPTS)[:, None]
    return prompt, prompt_mask, response, torch.arange(T) < responses[..., None]


def alone(model: PreTrainedModel) -> Tensor:
    """What the model's own forward says of each response of :func:`batch`, one sequence at a time.

    Returns:
        Log-probabilities ``[P, G, T]``.
    """
    prompt, prompt_mask, response, mask = (tensor.to(model.device) for tensor in batch(model))
    found = torch.zeros(response.shape, dtype=torch.float64, device=response.device)
    for p, g in torch.cartesian_prod(*map(torch.arange, response.shape[:2])).tolist():
        start, words = prompt[p][prompt_mask[p]], response[p, g][mask[p, g]]
        logits = model(input_ids=torch.cat([start, words])[None], use_cache=False).logits[0]
        log_probs = torch.log_softmax(logits[len(start) - 1 : -1].float(), -1)
        found[p, g, : len(words)] = log_probs.gather(1, words[:, None])[:, 0].to(found.dtype)
    return found


def together(model: PreTrainedModel, shares_prefix: bool) -> Tensor:
    """The same of :func:`batch` as the trainer computes it.

    Raises:
        ValueError: the model cannot share prompts.
    """
    scorer = TokenScorer(model, shares_prefix=shares_prefix)
    if scorer.shares_prefix != shares_prefix:
        raise ValueError("it cannot share prompts")
    return scorer(*batch(model)).log_probs.double()


def gap(model: PreTrainedModel, difference: Callable[[], Tensor]) -> float:
    """Largest absolute ``difference`` of two ways to compute the same: up to ``TOLERANCE`` it is rounding.

    Args:
        model: that computes it; its weights may be in 16 bits.
        difference: computes both ways and subtracts.
    """
    found = 0.0
    for dtype in (torch.float32, torch.float64):
        with Upcast(dtype), _one_by_one(model, dtype == torch.float64):
            found = float(difference().abs().max())
        # What is no number is no rounding either.
        if found <= TOLERANCE:
            break
    return found


@contextmanager
def conditions(model: PreTrainedModel, longest: int | None = None) -> Iterator[int | None]:
    """Leave gradients, random numbers, and all of the model that a trial changes, as they were.

    Inside, windows that sequences can be longer than are narrowed, so that the trial's few tokens reach
    beyond them, and attention is computed by something that takes any number format.

    Args:
        model: is changed inside.
        longest: tokens a sequence has at most; None if that is not known.

    Yields:
        The narrowest window that was narrowed, None if there was none.
    """
    devices = [model.device] if model.device.type == "cuda" else []
    owners = [*model.modules(), *(module.config for module in model.modules() if hasattr(module, "config"))]
    windows = {
        (id(owner), name): (owner, name, value)
        for owner in owners
        for name in _WINDOWS
        if type(value := vars(owner).get(name)) is int
        and value > _NARROW
        and (longest is None or value < longest)
    }
    with torch.no_grad(), torch.random.fork_rng(devices=devices), _any_format(model):
        try:
            for owner, name, _ in windows.values():
                setattr(owner, name, _NARROW)
            yield min((value for _, _, value in windows.values()), default=None)
        finally:
            for owner, name, value in windows.values():
                setattr(owner, name, value)


@contextmanager
def _any_format(model: PreTrainedModel) -> Iterator[None]:
    """Without kernels of attention that are made for 16 bits alone."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    if "flash" in (before or ""):
        model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        if config._attn_implementation != before and "flash" in (before or ""):
            model.set_attn_implementation(before)


@contextmanager
def _one_by_one(model: PreTrainedModel, needed: bool) -> Iterator[None]:
    """Let a mixture run its experts one by one: products of several at a time do not know float64."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    kept = [
        (config, config._experts_implementation)
        for config in configs.values()
        if needed and hasattr(config, "_experts_implementation")
    ]
    try:
        for config, _ in kept:
            config._experts_implementation = "eager"
        yield
    finally:
        for config, implementation in kept:
            config._experts_implementation = implementation
