"""Test on a few pictures whether batched scoring gives the same numbers as the model for single sequences.

:mod:`~torchrl_grpo.models.scoring.trial` does so for text. Families differ in how they place pictures: some
have positions of three axes, and in some the tokens of a picture see each other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from torchrl_grpo.data.pictures import encode
from torchrl_grpo.models.pictures import PictureInputs, PictureProcessor
from torchrl_grpo.models.scoring import trial
from torchrl_grpo.models.scoring.padding import join_files, pad_left
from torchrl_grpo.models.scoring.token_scorer import TokenScorer, backbone

# Width and height of the pictures of three prompts.
_SIZES: tuple[tuple[tuple[int, int], ...], ...] = (((72, 40), (30, 60)), (), ((56, 56),))


class PictureBatch(NamedTuple):
    """Inputs of a :class:`TokenScorer`, and the pictures of each prompt.

    Attributes:
        prompt: ``[P, L]``.
        prompt_mask: ``[P, L]``.
        response: ``[P, G, T]``.
        mask: ``[P, G, T]``.
        files: encoded pictures of each of the P prompts.
    """

    prompt: Tensor
    prompt_mask: Tensor
    response: Tensor
    mask: Tensor
    files: list[list[bytes]]


def batch(model: PreTrainedModel, processor: PictureProcessor) -> PictureBatch:
    """Create three prompts with two, no and one picture, and two responses to each."""
    from PIL import Image

    words, words_mask, response, mask = trial.batch(model)
    # The only tokens of pictures are those of the pictures.
    blocked = torch.tensor(processor.blocked)
    other = next(token for token in response.flatten() if token not in blocked)
    words, response = (ids.where(~torch.isin(ids, blocked), other) for ids in (words, response))
    generator = torch.Generator().manual_seed(0)
    prompts: list[list[int]] = []
    files: list[list[bytes]] = []
    for number, sizes in enumerate(_SIZES):
        start, *rest = words[number % 2][words_mask[number % 2]].tolist()
        pictures = [
            Image.frombytes(
                "RGB",
                size,
                bytes(torch.randint(256, (3 * size[0] * size[1],), generator=generator).tolist()),
            )
            for size in sizes
        ]
        ids = [start]
        for replacement in processor.replacements(sizes) if sizes else ():
            tokens = processor.processor.tokenizer(replacement, add_special_tokens=False)["input_ids"]
            # Pictures are next to each other in no template.
            ids += [*tokens, start]
        prompts.append(ids + rest)
        files.append([encode(picture) for picture in pictures])
    rows = torch.arange(len(_SIZES)) % 2
    return PictureBatch(*pad_left(prompts, 0), response[rows], mask[rows], files)


def look_ahead(model: PreTrainedModel, processor: PictureProcessor) -> Tensor:
    """Return by how much log-probabilities change with tokens after them.

    A family may let a prompt with pictures see itself both ways, and take the response for a part of it.

    Returns:
        Differences ``[P, G, T]`` float64, of the model's own forward pass.
    """
    tried = batch(model, processor)
    last = tried.mask.sum(-1, keepdim=True) - 1
    # Each response ends with the token that the one before it ends with.
    other = tried.response.scatter(-1, last, tried.response.gather(-1, last).roll(1, 1))
    scores, changed = (
        _score_one_by_one(model, processor, tried._replace(response=response))
        for response in (tried.response, other)
    )
    return (changed - scores).scatter(-1, last.to(scores.device), 0.0)


def score_one_by_one(model: PreTrainedModel, processor: PictureProcessor) -> Tensor:
    """Score the responses of :func:`batch` with the model's own forward pass, one sequence at a time.

    Returns:
        Log-probabilities ``[P, G, T]`` float64.
    """
    return _score_one_by_one(model, processor, batch(model, processor))


def _score_one_by_one(model: PreTrainedModel, processor: PictureProcessor, tried: PictureBatch) -> Tensor:
    device = model.device
    scores = torch.zeros(tried.response.shape, dtype=torch.float64, device=device)
    for p, g in torch.cartesian_prod(*map(torch.arange, tried.response.shape[:2])).tolist():
        start = tried.prompt[p][tried.prompt_mask[p]].to(device)
        words = tried.response[p, g][tried.mask[p, g]].to(device)
        inputs = PictureInputs(backbone(model), processor, [tried.files[p]])
        ids = torch.cat([start, words])[None]
        output = model(input_ids=ids, use_cache=False, **inputs.on(device), **inputs.token_types(ids))
        logits = output.logits[0, len(start) - 1 : -1].float()
        logits[:, list(processor.blocked)] = -torch.inf
        log_probs = torch.log_softmax(logits, -1).gather(1, words[:, None])[:, 0]
        scores[p, g, : len(words)] = log_probs.to(scores.dtype)
    return scores


def score_batch(model: PreTrainedModel, processor: PictureProcessor, shares_prefix: bool) -> Tensor:
    """Score the responses of :func:`batch` in one batch, as the trainer does.

    Returns:
        Log-probabilities ``[P, G, T]`` float64.
    """
    *tensors, files = batch(model, processor)
    scorer = TokenScorer(model, shares_prefix=shares_prefix, pictures=processor)
    packed, sizes = join_files(files)
    log_probs: Tensor = scorer(*tensors, files=packed, file_sizes=sizes).log_probs
    return log_probs.double()
