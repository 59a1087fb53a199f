"""Models that are no causal language models are refused before anything is planned or loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torchrl_grpo.config.schema import ModelConfig
from torchrl_grpo.errors import ModelError
from torchrl_grpo.models.kind import check_kind


def model(folder: Path, **settings: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(settings))
    return ModelConfig(name=str(folder))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"model_type": "llava", "vision_config": {}}, "llava reads more than text"),
        (
            {
                "model_type": "qwen2_vl",
                "architectures": ["Qwen2VLForConditionalGeneration"],
                "vision_config": {},
            },
            "Qwen2VLForConditionalGeneration reads more than text",
        ),
        ({"model_type": "t5", "is_encoder_decoder": True}, "t5 reads text with an encoder"),
        ({"model_type": "blip-2", "architectures": ["Blip2ForConditionalGeneration"]}, ".*text-only"),
    ],
)
def test_what_transformers_cannot_load_is_refused(
    tmp_path: Path, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ModelError, match=rf"model\.name=.*{says}"):
        check_kind(model(tmp_path, **settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        # Given text alone, this one is a causal language model.
        {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {}},
        {},
    ],
)
def test_what_transformers_can_load_passes(tmp_path: Path, settings: dict[str, Any]) -> None:
    check_kind(model(tmp_path, **settings))


def test_what_is_not_here_or_brings_its_own_code_passes(tmp_path: Path) -> None:
    check_kind(ModelConfig(name="somebody/something-not-on-this-machine"))
    own = {"model_type": "seer", "vision_config": {}, "auto_map": {"AutoModelForCausalLM": "seer.Seer"}}
    cfg = model(tmp_path, **own)
    with pytest.raises(ModelError):
        check_kind(cfg)
    cfg.trust_remote_code = True
    check_kind(cfg)
