"""The real vLLM generates from pictures what the trainer scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from picture_prompts import log_probs_of, prompts_of, sampling, scores
from tiny_vlm import build, build_tiny_vlm

from torchrl_grpo.config.schema import ModelConfig
from torchrl_grpo.inference.vllm_engine import VLLMEngine
from torchrl_grpo.models.loading import load_processor

pytestmark = [pytest.mark.integration, pytest.mark.slow]


# vLLM's own class of LLaVA needs torchvision, so it runs that of transformers.
@pytest.mark.parametrize(
    ("family", "engine_args"), [("idefics3", {}), ("llava", {"model_impl": "transformers"})]
)
def test_vllm_samples_what_the_trainer_scores(
    tmp_path: Path, family: str, engine_args: dict[str, Any]
) -> None:
    """The number of tokens is compared with the processor's, and a reload of weights forgets old pictures."""
    build_tiny_vlm(tmp_path, family)
    model, processor = build(family)
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
        engine_args=engine_args,
    )
    try:
        completions = engine.generate(prompts, sampling(shown))
        expected = scores(model, pictures, prompts, shown, completions)
        torch.testing.assert_close(log_probs_of(completions), expected, rtol=0, atol=1e-5)
        tokens = {token for group in completions for each in group for token in each.token_ids}
        assert tokens.isdisjoint(pictures.blocked)

        # The vision tower changes, and the pictures are the same.
        other, _ = build(family, seed=1)
        engine.load_weights((name, parameter.detach()) for name, parameter in other.named_parameters())
        engine.reset_cache()
        completions = engine.generate(prompts, sampling(shown))
        expected = scores(other, pictures, prompts, shown, completions)
        torch.testing.assert_close(log_probs_of(completions), expected, rtol=0, atol=1e-5)
    finally:
        engine.close()
