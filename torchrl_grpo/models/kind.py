"""Check that ``model.name`` is a causal language model, or one for pictures, from its local files."""

from __future__ import annotations

import json
from typing import Any

from torchrl_grpo.config.schema import ModelConfig
from torchrl_grpo.errors import ModelError
from torchrl_grpo.models.shape import local_folder

# Keys in the config.json of models that read more than text.
_MORE_THAN_TEXT = ("vision_config", "audio_config")


def check_kind(cfg: ModelConfig) -> None:
    """Reject a model that is not a causal language model: with images, audio or an encoder.

    Some models for images and text work as causal language models for text alone. Only for these transformers
    is imported, which takes seconds, because it knows which ones do.

    Raises:
        ModelError: transformers has no causal language model of this type.
    """
    folder = local_folder(cfg)
    if folder is None:
        return
    try:
        settings = json.loads((folder / "config.json").read_text())
    except (ValueError, RecursionError):
        return  # read_shape() reports the error
    if not isinstance(settings, dict):
        return  # as well
    if cfg.pictures:
        _check_reads_pictures(cfg, settings)
        return
    architectures = [str(name) for name in settings.get("architectures") or ()]
    if not _suspicious(settings, architectures) or _brings_its_own(settings, cfg):
        return
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if settings.get("model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return
    reads = "more than text" if any(key in settings for key in _MORE_THAN_TEXT) else "text with an encoder"
    raise ModelError(
        f"{cfg.shown}: {', '.join(architectures) or settings.get('model_type')} reads {reads}, and "
        "transformers has no causal language model of this type; write the name of a text-only instruct "
        "model instead"
    )


def _check_reads_pictures(cfg: ModelConfig, settings: dict[str, Any]) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    kind = settings.get("model_type")
    has_own = cfg.trust_remote_code and "AutoModelForImageTextToText" in (settings.get("auto_map") or {})
    if kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and not has_own:
        raise ModelError(
            f"model.name={cfg.name}: model.pictures=true needs a model for pictures and text, and "
            f"transformers has none of the type {kind}; write the name of one, such as "
            "Qwen/Qwen3-VL-4B-Instruct, or model.pictures=false"
        )


def _suspicious(settings: dict[str, Any], architectures: list[str]) -> bool:
    return (
        any(key in settings for key in _MORE_THAN_TEXT)
        or bool(settings.get("is_encoder_decoder"))
        or any(name.endswith("ForConditionalGeneration") for name in architectures)
    )


def _brings_its_own(settings: dict[str, Any], cfg: ModelConfig) -> bool:
    return cfg.trust_remote_code and "AutoModelForCausalLM" in (settings.get("auto_map") or {})
