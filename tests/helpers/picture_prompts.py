"""Prompts with pictures for a random model, as the environment renders them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL.Image import Image
from tiny_vlm import picture
from torch import Tensor

from torchrl_grpo.data import pictures
from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.chat import prompt_pictures, render
from torchrl_grpo.inference.protocol import Completion, PromptPictures, Sampling
from torchrl_grpo.models.pictures import PictureProcessor, attach
from torchrl_grpo.models.scoring.padding import join_files, pad_left, pad_right
from torchrl_grpo.models.scoring.token_scorer import TokenScorer

#: Temperature of :func:`sampling`.
TEMPERATURE = 0.7

#: Two pictures of several sizes, none, one, three, and one that differs from the third in its colors only.
SHOWN: list[list[Image]] = [
    [picture(40, 24, 1), picture(70, 50, 2)],
    [],
    [picture(30, 30, 3)],
    [picture(64, 20, 4), picture(20, 64, 5), picture(33, 47, 6)],
    [picture(30, 30, 7)],
]


def tokenizer_of(processor: Any) -> Any:
    """Return the processor's tokenizer, which renders pictures."""
    attach(processor.tokenizer, PictureProcessor(processor))
    return processor.tokenizer


def example_of(shown: list[Image], question: str = "How many circles?") -> Example:
    """Return a problem whose pictures are in the middle of its question."""
    made = tuple(pictures.from_bytes(pictures.encode(each), "here") for each in shown)
    content = f"Look: {(pictures.MARK + ' and ') * len(made)}{question}"
    return Example("pictures/1", [{"role": "user", "content": content}], pictures=made)


def prompts_of(processor: Any) -> tuple[list[list[int]], list[PromptPictures]]:
    """Return the tokens and the pictures of a prompt for each entry of :data:`SHOWN`."""
    tokenizer = tokenizer_of(processor)
    prompts, shown = [], []
    for each in SHOWN:
        example = example_of(each)
        _, tokens = render(tokenizer, example)
        prompt = prompt_pictures(tokenizer, example, tokens)
        assert prompt is not None
        prompts.append(tokens)
        shown.append(prompt)
    return prompts, shown


def sampling(shown: Sequence[PromptPictures]) -> Sampling:
    """Return how to sample two responses of six tokens to each prompt."""
    seeds = [100 * number for number in range(len(shown))]
    return Sampling(2, 6, TEMPERATURE, seeds, ignore_eos=True, pictures=shown)


def scores(
    model: Any,
    processor: PictureProcessor,
    prompts: Sequence[Sequence[int]],
    shown: Sequence[PromptPictures],
    completions: Sequence[Sequence[Completion]],
) -> Tensor:
    """Log-probabilities ``[P, G, T]`` of the responses, each computed with its own prompt."""
    prompt, prompt_mask = pad_left(prompts, 0)
    flat = [completion.token_ids for group in completions for completion in group]
    response, mask = (each.view(len(prompts), 2, -1) for each in pad_right(flat, 0, torch.int64))
    scorer = TokenScorer(model, TEMPERATURE, shares_prefix=False, pictures=processor)
    files, sizes = join_files([each.files for each in shown])
    with torch.no_grad():
        log_probs: Tensor = scorer(
            prompt, prompt_mask, response, mask, files=files, file_sizes=sizes
        ).log_probs
    return log_probs


def log_probs_of(completions: Sequence[Sequence[Completion]]) -> Tensor:
    """Return what an engine says of its responses, ``[P, G, T]``."""
    return torch.tensor([[completion.log_probs for completion in group] for group in completions])
