"""Random models for pictures and text, with their families' own processors and a tokenizer made here.

The processor of LFM2-VL needs torchvision. Where that is missing, tests of this family are skipped.

The pictures of a test are small, and so are the models. Video processors need torchvision, which is not
installed, and are left out: nothing here has videos.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

_WORDS = [
    "What is 3 + 4? How many circles are in the picture? Answer with the number only.",
    "<think> 12 + 19 is 31 </think> <answer> 31 </answer> What time does the clock show?",
    "What share of the circle is colored? Write the answer between <answer> and </answer>.",
]
_SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<start_of_image>",
    "<end_of_image>",
    "<image_soft_token>",
    "<img>",
    "</img>",
    "<IMG_CONTEXT>",
    "<video>",
]
# The template of each family writes its own mark for a picture.
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}MARK{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}
FAMILIES = ("idefics3", "qwen2_5_vl", "qwen3_vl", "gemma3", "llava_onevision", "internvl", "llava", "lfm2_vl")


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture of random colors."""
    colors = np.random.RandomState(seed).randint(0, 256, (height, width, 3), dtype="uint8")
    return Image.fromarray(colors)


def tiny_tokenizer(mark: str, **special: str) -> Any:
    """A tokenizer whose chat template writes ``mark`` for a picture."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(_WORDS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        extra_special_tokens=special,
    )
    tokenizer.chat_template = _TEMPLATE.replace("MARK", mark)
    return tokenizer


def build(family: str, seed: int = 0) -> tuple[Any, Any]:
    """Return a random model of a family, and the family's processor."""
    import torch

    model_class, config, processor = _PARTS[family]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.1)
    model.generation_config.eos_token_id = processor.tokenizer.eos_token_id
    return model.eval(), processor


def build_tiny_vlm(folder: Path, family: str = "idefics3", seed: int = 0) -> Path:
    """Write a model and its processor to ``folder``, and return it."""
    model, processor = build(family, seed)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def _without_videos(processor_class: Any) -> Any:
    """Return the class of a processor that takes no video processor, which would need torchvision."""

    class WithoutVideos(processor_class):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name == "video_processor":
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

    WithoutVideos.__name__ = processor_class.__name__
    return WithoutVideos


def _ids(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


def _vision(**more: Any) -> dict[str, Any]:
    return {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
        **more,
    }


def _idefics3() -> tuple[Any, Any, Any]:
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    tokenizer = tiny_tokenizer("<image>")
    config = Idefics3Config(
        vision_config=_vision(model_type="idefics3_vision"),
        text_config={"model_type": "llama", **_SIZES, **_ids(tokenizer)},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    # Pictures that are longer than 32 are divided into tiles.
    images = Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    processor = Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=tokenizer.chat_template)
    return Idefics3ForConditionalGeneration, config, processor


def _qwen_images(merge: int, patch: int) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(
        patch_size=patch,
        merge_size=merge,
        temporal_patch_size=2,
        size={"shortest_edge": 16 * 16, "longest_edge": 64 * 64},
    )


def _qwen_ids(tokenizer: Any) -> dict[str, Any]:
    names = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    return {name: tokenizer.convert_tokens_to_ids(text) for name, text in names.items()}


_QWEN_MARK = "<|vision_start|><|image_pad|><|vision_end|>"
_QWEN_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN_ROPE = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}


def _qwen2_5_vl() -> tuple[Any, Any, Any]:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor

    tokenizer = tiny_tokenizer(_QWEN_MARK)
    vision = {**_QWEN_VISION, "out_hidden_size": 128, "window_size": 32, "fullatt_block_indexes": [1]}
    text = {**_SIZES, **_ids(tokenizer), "rope_parameters": _QWEN_ROPE, "hidden_size": 128}
    del text["head_dim"]
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_qwen_ids(tokenizer))
    processor = _without_videos(Qwen2_5_VLProcessor)(
        _qwen_images(2, 8), tokenizer, None, chat_template=tokenizer.chat_template
    )
    return Qwen2_5_VLForConditionalGeneration, config, processor


def _qwen3_vl() -> tuple[Any, Any, Any]:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration, Qwen3VLProcessor

    tokenizer = tiny_tokenizer(_QWEN_MARK)
    vision = {**_QWEN_VISION, "out_hidden_size": 32, "num_position_embeddings": 16}
    vision |= {"deepstack_visual_indexes": [0]}
    text = {**_SIZES, **_ids(tokenizer), "rope_parameters": _QWEN_ROPE}
    config = Qwen3VLConfig(text_config=text, vision_config=vision, **_qwen_ids(tokenizer))
    processor = _without_videos(Qwen3VLProcessor)(
        _qwen_images(2, 8), tokenizer, None, chat_template=tokenizer.chat_template
    )
    return Qwen3VLForConditionalGeneration, config, processor


def _gemma3() -> tuple[Any, Any, Any]:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    tokenizer = tiny_tokenizer(
        "<start_of_image>",
        boi_token="<start_of_image>",
        eoi_token="<end_of_image>",
        image_token="<image_soft_token>",
    )
    text = {**_SIZES, **_ids(tokenizer), "sliding_window": 24, "query_pre_attn_scalar": 32}
    text["layer_types"] = ["sliding_attention", "full_attention"]
    config = Gemma3Config(
        text_config=text,
        vision_config=_vision(model_type="siglip_vision_model"),
        mm_tokens_per_image=4,
        boi_token_index=tokenizer.convert_tokens_to_ids("<start_of_image>"),
        eoi_token_index=tokenizer.convert_tokens_to_ids("<end_of_image>"),
        image_token_index=tokenizer.convert_tokens_to_ids("<image_soft_token>"),
    )
    images = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    processor = Gemma3Processor(images, tokenizer, chat_template=tokenizer.chat_template, image_seq_length=4)
    return Gemma3ForConditionalGeneration, config, processor


def _llava_onevision() -> tuple[Any, Any, Any]:
    from transformers import (
        LlavaOnevisionConfig,
        LlavaOnevisionForConditionalGeneration,
        LlavaOnevisionProcessor,
    )
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
        LlavaOnevisionImageProcessorPil,
    )

    tokenizer = tiny_tokenizer("<image>")
    grid = [[32, 32], [32, 64], [64, 32], [64, 64]]
    config = LlavaOnevisionConfig(
        text_config={"model_type": "qwen2", **_SIZES, **_ids(tokenizer)},
        vision_config=_vision(model_type="siglip_vision_model"),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=grid,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_4",
    )
    images = LlavaOnevisionImageProcessorPil(size={"height": 32, "width": 32}, image_grid_pinpoints=grid)
    processor = _without_videos(LlavaOnevisionProcessor)(
        images,
        tokenizer,
        None,
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        chat_template=tokenizer.chat_template,
        vision_aspect_ratio="anyres_max_4",
    )
    return LlavaOnevisionForConditionalGeneration, config, processor


def _internvl() -> tuple[Any, Any, Any]:
    from transformers import InternVLConfig, InternVLForConditionalGeneration, InternVLProcessor
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    tokenizer = tiny_tokenizer(
        "<IMG_CONTEXT>",
        start_image_token="<img>",
        end_image_token="</img>",
        context_image_token="<IMG_CONTEXT>",
        video_token="<video>",
    )
    config = InternVLConfig(
        text_config={"model_type": "qwen2", **_SIZES, **_ids(tokenizer)},
        vision_config=_vision(image_size=[32, 32], patch_size=[8, 8]),
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        downsample_ratio=0.5,
    )
    images = GotOcr2ImageProcessorPil(
        size={"height": 32, "width": 32}, crop_to_patches=True, min_patches=1, max_patches=4
    )
    processor = _without_videos(InternVLProcessor)(
        images, tokenizer, None, image_seq_length=4, chat_template=tokenizer.chat_template
    )
    return InternVLForConditionalGeneration, config, processor


def _llava() -> tuple[Any, Any, Any]:
    from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = tiny_tokenizer("<image>")
    config = LlavaConfig(
        text_config={"model_type": "llama", **_SIZES, **_ids(tokenizer)},
        vision_config=_vision(model_type="clip_vision_model", projection_dim=32),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
    )
    images = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    processor = LlavaProcessor(
        images,
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        chat_template=tokenizer.chat_template,
        num_additional_image_tokens=1,
    )
    return LlavaForConditionalGeneration, config, processor


def _lfm2_vl() -> tuple[Any, Any, Any]:
    pytest.importorskip("torchvision", reason="the processor of LFM2-VL needs torchvision")
    from transformers import Lfm2VlConfig, Lfm2VlForConditionalGeneration, Lfm2VlProcessor
    from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor

    tokenizer = tiny_tokenizer(
        "<image>",
        image_token="<image>",
        image_start_token="<img>",
        image_end_token="</img>",
        image_thumbnail_token="<global-img>",
    )
    # A convolution carries two tokens on to the next.
    text = {**_SIZES, **_ids(tokenizer), "layer_types": ["conv", "full_attention"], "model_type": "lfm2"}
    text |= {"block_auto_adjust_ff_dim": False}
    del text["head_dim"]
    vision = _vision(model_type="siglip2_vision_model", num_patches=16)
    del vision["image_size"]
    config = Lfm2VlConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        projector_hidden_size=64,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    # Pictures of more than 16 tokens are divided into tiles.
    images = Lfm2VlImageProcessor(
        encoder_patch_size=8, tile_size=32, min_image_tokens=2, max_image_tokens=16, max_tiles=4
    )
    processor = Lfm2VlProcessor(images, tokenizer, chat_template=tokenizer.chat_template)
    return Lfm2VlForConditionalGeneration, config, processor


_PARTS: dict[str, Any] = {
    "idefics3": _idefics3,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "gemma3": _gemma3,
    "llava_onevision": _llava_onevision,
    "internvl": _internvl,
    "llava": _llava,
    "lfm2_vl": _lfm2_vl,
}
