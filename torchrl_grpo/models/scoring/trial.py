"""Test on a few tokens whether batched scoring gives the same numbers as the model for single sequences.

A model may derive positions, windows or states from something that padding changes or that a row of groups
does not have. No list of such models would be complete, so it is measured. All numbers are computed in at
least float32, whatever the dtype of the weights. If they differ in float32, they are computed again in
float64, so that a difference is never just rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.models.scoring.upcast import Upcast

# In nats. Float32 rounding gives 2e-6 in small models and about 1e-5 in real ones.
TOLERANCE = 1e-4
# Lengths of two prompts and their responses. Some exceed the windows of a trial, and some are very short.
_PROMPTS = (4, 9)
_RESPONSES = ((12, 5), (1, 8))
# Names of window sizes in the configurations and modules of transformers' models.
_WINDOWS = (
    "sliding_window",
    "sliding_window_size",
    "attention_window_size",
    "window_size",
    "attention_chunk_size",
    "index_topk",
)
# Window size during a trial.
_NARROW = 4


def batch(model: PreTrainedModel) -> tuple[Tensor, ...]:
    """Create a scorer's inputs: ragged prompts ``[P, L]`` and responses ``[P, G, T]``, each with a mask."""
    settings = model.config.get_text_config().to_dict()
    size = settings["vocab_size"]
    special = {0, 1, 2}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = settings.get(name)
        special |= set(ids if isinstance(ids, list) else [ids])
    # Special tokens may be untrained. They are the first or the last ones of a vocabulary.
    ordinary = torch.tensor([i for i in range(size // 64, size // 2) if i not in special])
    generator = torch.Generator().manual_seed(0)
    responses = torch.tensor(_RESPONSES)
    (P, G), L, T = responses.shape, max(_PROMPTS), int(responses.max())
    ids = ordinary[torch.randint(len(ordinary), (P * (L + G * T),), generator=generator)]
    prompt, response = ids[: P * L].view(P, L), ids[P * L :].view(P, G, T)
    prompt_mask = torch.arange(L) >= L - torch.tensor(_PROMPTS)[:, None]
    return prompt, prompt_mask, response, torch.arange(T) < responses[..., None]


def score_one_by_one(model: PreTrainedModel) -> Tensor:
    """Score the responses of :func:`batch` with the model's own forward pass, one sequence at a time.

    Returns:
        Log-probabilities ``[P, G, T]`` float64.
    """
    prompt, prompt_mask, response, mask = (tensor.to(model.device) for tensor in batch(model))
    scores = torch.zeros(response.shape, dtype=torch.float64, device=response.device)
    for p, g in torch.cartesian_prod(*map(torch.arange, response.shape[:2])).tolist():
        start, words = prompt[p][prompt_mask[p]], response[p, g][mask[p, g]]
        logits = model(input_ids=torch.cat([start, words])[None], use_cache=False).logits[0]
        log_probs = torch.log_softmax(logits[len(start) - 1 : -1].float(), -1)
        scores[p, g, : len(words)] = log_probs.gather(1, words[:, None])[:, 0].to(scores.dtype)
    return scores


def score_batch(model: PreTrainedModel, shares_prefix: bool) -> Tensor:
    """Score the responses of :func:`batch` in one batch, as the trainer does.

    Returns:
        Log-probabilities ``[P, G, T]`` float64.

    Raises:
        ValueError: the model cannot share prompts.
    """
    scorer = TokenScorer(model, shares_prefix=shares_prefix)
    if scorer.shares_prefix != shares_prefix:
        raise ValueError("it cannot share prompts")
    log_probs: Tensor = scorer(*batch(model)).log_probs
    return log_probs.double()


def largest_difference(model: PreTrainedModel, difference: Callable[[], Tensor]) -> float:
    """Return the largest absolute ``difference`` of two computations; up to ``TOLERANCE`` it is rounding.

    Args:
        model: model of both computations. Its weights may be in 16 bits.
        difference: function that runs both computations and subtracts the results.
    """
    largest = 0.0
    for dtype in (torch.float32, torch.float64):
        with Upcast(dtype), _one_by_one(model, dtype == torch.float64):
            largest = float(difference().abs().max())
        # NaN is not within the tolerance.
        if largest <= TOLERANCE:
            break
    return largest


@contextmanager
def conditions(model: PreTrainedModel, longest: int | None = None) -> Iterator[int | None]:
    """Set up a trial, and restore the random state and the model on exit.

    Inside the context there are no gradients. Windows that are shorter than ``longest`` are narrowed, so that
    the few tokens of a trial exceed them. Attention kernels that support only 16 bits are replaced.

    Args:
        model: model that is changed inside the context.
        longest: largest number of tokens in a sequence; None if unknown.

    Yields:
        The original size of the smallest narrowed window, or None if none was narrowed.
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
    """Replace attention kernels that support only 16 bits."""
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
    """Make a mixture run its experts one by one, because grouped products do not support float64."""
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
