"""``python -m benchmarks.small_vlm FOLDER``: an untrained model of a million parameters for small pictures.

It is an Idefics3, with a tokenizer that is trained on the questions of ``env.dataset=pictures``. Pictures
have 32 x 32 pixels and four tokens. ``benchmarks.learning pictures`` trains it. The vocabulary
has the words of those questions and of the chat template, so that prompts are short.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SIDE, _PATCH, _SHUFFLE = 32, 8, 2
_CONTROL = (
    "<|im_start|>",
    "<|im_end|>",
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
)
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build(folder: Path, seed: int) -> None:
    """Write the model and its processor to a folder."""
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    tokenizer = _tokenizer()
    tokens = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    width = {"hidden_size": 128, "num_attention_heads": 4}
    text = {"intermediate_size": 384, "num_hidden_layers": 3, "head_dim": 32, "max_position_embeddings": 512}
    vision = {"intermediate_size": 256, "num_hidden_layers": 2, "image_size": _SIDE, "patch_size": _PATCH}
    torch.manual_seed(seed)
    model = Idefics3ForConditionalGeneration(
        Idefics3Config(
            text_config={"model_type": "llama", **width, **text, **tokens, "tie_word_embeddings": False},
            vision_config={"model_type": "idefics3_vision", **width, **vision},
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            scale_factor=_SHUFFLE,
            tie_word_embeddings=False,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": _SIDE}, max_image_size={"longest_edge": _SIDE}, do_image_splitting=False
    )
    processor = Idefics3Processor(
        images,
        tokenizer,
        image_seq_len=(_SIDE // _PATCH // _SHUFFLE) ** 2,
        chat_template=tokenizer.chat_template,
    )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{folder} has a model of {count:,} parameters and {len(tokenizer)} tokens")


def _tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from torchrl_grpo.config.schema import EnvConfig
    from torchrl_grpo.config.values import AnswerFormat
    from torchrl_grpo.data.picture_tasks import Generated

    env = EnvConfig(
        dataset="pictures", task_size=500, prompt_template="{question}", answer_format=AnswerFormat.plain
    )
    problems = Generated(env, seed=0, split="train", is_held_out=False)
    texts = [f"user\n{each.messages[-1]['content']}\nassistant\n{each.solution}" for each in problems]
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=768,
        special_tokens=list(_CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token=_CONTROL[0], eos_token=_CONTROL[1], pad_token=_CONTROL[1]
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


if __name__ == "__main__":
    build(Path(sys.argv[1]), seed=0)
