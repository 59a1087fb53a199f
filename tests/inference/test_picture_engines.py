"""Generation from prompts with pictures agrees with the trainer's scores of the same responses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from picture_prompts import prompts_of
from tiny_vlm import FAMILIES, build, build_tiny_vlm
from torch import Tensor

from torchrl_grpo.config.schema import ModelConfig
from torchrl_grpo.inference.protocol import Completion, PromptPictures, Request, Sampling
from torchrl_grpo.inference.transformers_engine import TransformersEngine
from torchrl_grpo.models.loading import load_processor
from torchrl_grpo.models.pictures import PictureProcessor
from torchrl_grpo.models.scoring.padding import join_files, pad_left, pad_right
from torchrl_grpo.models.scoring.token_scorer import TokenScorer

_TEMPERATURE = 0.7


def _sampling(shown: Sequence[PromptPictures]) -> Sampling:
    seeds = [100 * number for number in range(len(shown))]
    return Sampling(2, 6, _TEMPERATURE, seeds, ignore_eos=True, pictures=shown)


def _scores(
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
    scorer = TokenScorer(model, _TEMPERATURE, shares_prefix=False, pictures=processor)
    files, sizes = join_files([each.files for each in shown])
    with torch.no_grad():
        log_probs: Tensor = scorer(
            prompt, prompt_mask, response, mask, files=files, file_sizes=sizes
        ).log_probs
    return log_probs


def _engine(model: Any, processor: PictureProcessor, max_rows: int = 64) -> TransformersEngine:
    tokenizer = processor.processor.tokenizer
    return TransformersEngine(
        model, [tokenizer.eos_token_id], tokenizer.pad_token_id, max_rows, pictures=processor
    )


def _log_probs(completions: Sequence[Sequence[Completion]]) -> Tensor:
    return torch.tensor([[completion.log_probs for completion in group] for group in completions])


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_engine_samples_what_the_trainer_scores(family: str) -> None:
    model, processor = build(family)
    pictures = PictureProcessor(processor)
    prompts, shown = prompts_of(processor)
    completions = _engine(model, pictures).generate(prompts, _sampling(shown))
    expected = _scores(model, pictures, prompts, shown, completions)
    torch.testing.assert_close(_log_probs(completions), expected, rtol=0, atol=1e-5)
    # Two prompts of the same tokens about different pictures are two prompts.
    assert prompts[2] == prompts[4]
    assert completions[2][0].log_probs[0] != completions[4][0].log_probs[0]


def test_transformers_engine_continues_an_interrupted_response() -> None:
    """A response goes on after its prompt with pictures, and in parts of a batch."""
    model, processor = build("qwen2_5_vl")
    pictures = PictureProcessor(processor)
    prompts, shown = prompts_of(processor)
    engine = _engine(model, pictures, max_rows=3)
    whole = engine.generate(prompts, _sampling(shown))
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
    completions = _engine(model, pictures).generate(prompts, _sampling(shown))
    tokens = {token for group in completions for each in group for token in each.token_ids}
    assert tokens.isdisjoint(pictures.blocked)
    expected = _scores(model, pictures, prompts, shown, completions)
    torch.testing.assert_close(_log_probs(completions), expected, rtol=0, atol=1e-5)


@pytest.mark.integration
@pytest.mark.slow
def test_vllm_samples_what_the_trainer_scores(tmp_path: Path) -> None:
    """The number of tokens is compared with the processor's, and a reload of weights forgets old pictures."""
    from torchrl_grpo.inference.vllm_engine import VLLMEngine

    build_tiny_vlm(tmp_path)
    model, processor = build("idefics3")
    pictures = load_processor(str(tmp_path), ModelConfig(name=str(tmp_path), pictures=True))
    assert pictures is not None
    prompts, shown = prompts_of(processor)
    engine = VLLMEngine(
        str(tmp_path),
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_model_len=512,
        gpu_memory_utilization=0.5,
        blocked=pictures.blocked,
        max_num_seqs=16,
        seed=0,
        kv_cache_gib=1,
    )
    try:
        completions = engine.generate(prompts, _sampling(shown))
        expected = _scores(model, pictures, prompts, shown, completions)
        torch.testing.assert_close(_log_probs(completions), expected, rtol=0, atol=1e-5)
        tokens = {token for group in completions for each in group for token in each.token_ids}
        assert tokens.isdisjoint(pictures.blocked)

        # The vision tower changes, and the pictures are the same.
        other, _ = build("idefics3", seed=1)
        engine.load_weights((name, parameter.detach()) for name, parameter in other.named_parameters())
        engine.reset_cache()
        completions = engine.generate(prompts, _sampling(shown))
        expected = _scores(other, pictures, prompts, shown, completions)
        torch.testing.assert_close(_log_probs(completions), expected, rtol=0, atol=1e-5)
    finally:
        engine.close()
