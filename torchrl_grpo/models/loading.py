"""Resolve ``model.name`` and load its tokenizer and model. Error messages say what to write instead."""

from __future__ import annotations

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from torchrl_grpo.config import Config
from torchrl_grpo.config.schema import ModelConfig
from torchrl_grpo.errors import ModelError, first_line
from torchrl_grpo.models import smollm2
from torchrl_grpo.models.pictures import PictureProcessor, attach
from torchrl_grpo.models.quantization import loading_options
from torchrl_grpo.models.shape import model_folder
from torchrl_grpo.runtime import hub
from torchrl_grpo.runtime.oom import stop_on_oom
from torchrl_grpo.runtime.paths import expanded


def resolve(cfg: ModelConfig) -> str:
    """Return the folder or hub name to load.

    ``smollm2-135m`` is converted from its wheel, and a hub model is downloaded if ``model.cache_dir`` is set.

    Raises:
        ModelError: the folder does not exist or has no model, the download failed, or the SmolLM2 wheel is
            not installed.
    """
    if cfg.name == smollm2.NAME:
        return str(smollm2.prepare(cfg.cache_dir))
    if (folder := model_folder(cfg)) is not None:
        return str(folder.resolve())
    # Without an answer, what is cached is loaded without asking for each file.
    hub.why_unreachable()
    if cfg.cache_dir is None:
        return cfg.name
    try:
        # Download to a folder, because vLLM's cache option covers the weights but not the other files.
        return str(snapshot_download(cfg.name, cache_dir=cfg.cache_dir))
    except (OSError, ValueError) as error:
        raise _cannot_load("model", cfg, error) from error


def load_processor(source: str, cfg: ModelConfig) -> PictureProcessor | None:
    """Load what prepares pictures for the model at ``source``; None without ``model.pictures``.

    Raises:
        ModelError: the processor cannot be loaded, or takes no pictures.
    """
    if not cfg.pictures:
        return None
    try:
        processor = AutoProcessor.from_pretrained(source, trust_remote_code=cfg.trust_remote_code)
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise _cannot_load("processor for pictures (model.pictures)", cfg, error) from error
    if not hasattr(processor, "image_processor") or not hasattr(processor, "image_token"):
        raise ModelError(
            f"model.name={cfg.name}: it has no processor for pictures, which model.pictures=true needs; "
            "choose a model for pictures and text, or write model.pictures=false"
        )
    return PictureProcessor(processor)


def load_tokenizer(source: str, cfg: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of ``source`` with a pad token and the chat template of ``model.chat_template``.

    With ``model.pictures``, the model's processor is attached to it.

    Raises:
        ModelError: the tokenizer cannot be loaded, has no end token, or has no chat template.
    """
    tokenizer = read_tokenizer(source, cfg)
    pictures = load_processor(source, cfg)
    if pictures is not None:
        own = pictures.processor
        tokenizer = own.tokenizer
        tokenizer.chat_template = own.chat_template or tokenizer.chat_template
        attach(tokenizer, pictures)
    if cfg.chat_template is not None:
        path = expanded(cfg.chat_template)
        looks_like_file = "{" not in cfg.chat_template
        if looks_like_file and not path.is_file():
            raise ModelError(
                f"model.chat_template={cfg.chat_template}: there is no such file; "
                "write a path to a Jinja file, or the template itself"
            )
        tokenizer.chat_template = path.read_text() if looks_like_file else cfg.chat_template
    if tokenizer.chat_template is None:
        raise ModelError(
            f"{cfg.shown}: its tokenizer has no chat template; "
            "write model.chat_template=<path to a Jinja file> (or choose an instruct model)"
        )
    if tokenizer.eos_token_id is None:
        raise ModelError(f"{cfg.shown}: its tokenizer has no end-of-sequence token; choose another")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if pictures is not None:
        pictures.processor.chat_template = tokenizer.chat_template
    return tokenizer


def read_tokenizer(source: str, cfg: ModelConfig) -> PreTrainedTokenizerBase:
    """Read the tokenizer of ``source`` as it is.

    Raises:
        ModelError: the tokenizer cannot be loaded.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source, trust_remote_code=cfg.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise _cannot_load("tokenizer", cfg, error) from error
    return tokenizer


def read_config(source: str, cfg: ModelConfig) -> PreTrainedConfig:
    """Read the configuration of the text model of ``source``.

    Raises:
        ModelError: it cannot be read.
    """
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=cfg.trust_remote_code)
    except (OSError, ValueError) as error:
        raise _cannot_load("configuration", cfg, error) from error
    return config.get_text_config()


def check_context(source: str, cfg: Config, teacher: ModelConfig | None = None) -> None:
    """Reject a sequence length that the model, or the teacher in its place, does not support.

    Raises:
        ModelError: ``inference_model.max_model_len`` exceeds the model's context, or the length from which on
            LongRoPE uses its second set of position factors.
    """
    model = cfg.model if teacher is None else teacher
    config = read_config(source, model)
    length = config.to_dict().get("max_position_embeddings")
    max_len = cfg.inference_model.max_model_len
    if length is not None and max_len > length:
        raise ModelError(
            f"inference_model.max_model_len={max_len}: {model.name} supports at most {length} tokens; "
            f"write inference_model.max_model_len={length} or less"
        )
    length = _short_rope_length(config)
    if length is not None and max_len > length:
        raise ModelError(
            f"inference_model.max_model_len={max_len}: beyond {length} tokens {model.name} uses other "
            "position factors (longrope), and the choice depends on the other sequences of a batch; "
            f"write inference_model.max_model_len={length} or less"
        )


def _short_rope_length(config: PreTrainedConfig) -> int | None:
    """Return the length up to which LongRoPE (arXiv 2402.13753) uses its first factors; None for others."""
    settings = config.to_dict()
    rope = settings.get("rope_parameters") or {}
    if rope.get("rope_type") != "longrope":
        return None
    return int(rope["original_max_position_embeddings"])


def load_model(
    source: str,
    cfg: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    quantized: str = "none",
    instead: str = "start a new run with a smaller model.name",
) -> PreTrainedModel:
    """Load the causal language model at ``source``, or with ``model.pictures`` one for pictures and text.

    It is in evaluation mode.

    Args:
        source: folder or hub name.
        cfg: configuration with the name that the user wrote, and whether code of the model may run.
        device: device of the tensors. They are loaded one by one, so host memory never holds all of them.
        dtype: dtype of the weights.
        quantized: ``train_model.quantization``; quantized matrices are not in ``dtype``.
        instead: fix for the message about memory.

    Raises:
        ModelError: the model cannot be loaded.
        TrainingStopped: memory ran out.
    """
    options = {"device_map": {"": device}, **loading_options(quantized, device, dtype)}
    dtype_name = str(dtype).removeprefix("torch.")
    with stop_on_oom(
        f"{cfg.shown}: memory ran out while it was loaded on {device} in {dtype_name}: {instead}"
    ):
        try:
            model = (AutoModelForImageTextToText if cfg.pictures else AutoModelForCausalLM).from_pretrained(
                source,
                dtype=dtype,
                trust_remote_code=cfg.trust_remote_code,
                use_safetensors=True,
                **options,
            )
        except (OSError, ValueError, TypeError, ImportError, StrictDataclassError) as error:
            raise _cannot_load("model", cfg, error) from error
        return model.eval()


def end_token_ids(model_or_source: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return all tokens that end a response, from the tokenizer and the generation config, sorted."""
    ids = {int(tokenizer.eos_token_id)}
    listed = model_or_source.generation_config.eos_token_id if model_or_source.generation_config else None
    if listed is not None:
        ids.update([listed] if isinstance(listed, int) else listed)
    return sorted(ids)


def _cannot_load(what: str, cfg: ModelConfig, error: Exception) -> ModelError:
    return ModelError(
        f"{cfg.shown}: the {what} cannot be loaded ({first_line(error)}); write {smollm2.NAME}, "
        "a local folder written by save_pretrained, or a hub name (with network, or already in its cache)"
    )
