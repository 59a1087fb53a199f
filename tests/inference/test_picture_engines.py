"""Generation from prompts with pictures agrees with the trainer's scores of the same responses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from picture_prompts import log_probs_of, prompts_of, sampling, scores
from tiny_vlm import FAMILIES, build

from torchrl_grpo.inference.protocol import Request
from torchrl_grpo.inference.transformers_engine import TransformersEngine
from torchrl_grpo.models.pictures import PictureProcessor


def _engine(model: Any, processor: PictureProcessor, max_rows: int = 64) -> TransformersEngine:
    tokenizer = processor.processor.tokenizer
    return TransformersEngine(
        model, [tokenizer.eos_token_id], tokenizer.pad_token_id, max_rows, pictures=processor
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_engine_samples_what_the_trainer_scores(family: str) -> None:
    model, processor = build(family)
    pictures = PictureProcessor(processor)
    prompts, shown = prompts_of(processor)
    completions = _engine(model, pictures).generate(prompts, sampling(shown))
    expected = scores(model, pictures, prompts, shown, completions)
    torch.testing.assert_close(log_probs_of(completions), expected, rtol=0, atol=1e-5)
    # Two prompts of the same tokens about different pictures are two prompts.
    assert prompts[2] == prompts[4]
    assert completions[2][0].log_probs[0] != completions[4][0].log_probs[0]


def test_transformers_engine_continues_an_interrupted_response() -> None:
    """A response goes on after its prompt with pictures, and in parts of a batch."""
    model, processor = build("qwen2_5_vl")
    pictures = PictureProcessor(processor)
    prompts, shown = prompts_of(processor)
    engine = _engine(model, pictures, max_rows=3)
    whole = engine.generate(prompts, sampling(shown))
    request = Request("a", [*prompts[0], *whole[0][0].token_ids[:2]], 4, 0.0, pictures=shown[0])
    engine.submit([request])
    while not (ended := engine.step()):
        pass
    continued = ended[0][1].token_ids
    engine.submit([Request("b", [*request.tokens, continued[0]], 3, 0.0, pictures=shown[0])])
    while not (ended := engine.step()):
        pass
    assert ended[0][1].token_ids == continued[1:]


def test_tokens_of_pictures_are_never_sampled() -> None:
    model, processor = build("idefics3")
    pictures = PictureProcessor(processor)
    with torch.no_grad():
        # Without the block, nearly all tokens would be this one.
        model.lm_head.weight[list(pictures.blocked)] *= 100
    prompts, shown = prompts_of(processor)
    completions = _engine(model, pictures).generate(prompts, sampling(shown))
    tokens = {token for group in completions for each in group for token in each.token_ids}
    assert tokens.isdisjoint(pictures.blocked)
    expected = scores(model, pictures, prompts, shown, completions)
    torch.testing.assert_close(log_probs_of(completions), expected, rtol=0, atol=1e-5)
