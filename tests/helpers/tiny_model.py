"""A random Llama of about 50,000 parameters with its own tokenizer, made in a second and without network.

It answers nonsense, but has all that a real model folder has: a byte-level BPE tokenizer, a chat template,
an end-of-turn token and safetensors weights that transformers and vLLM both load.
"""

from __future__ import annotations

from pathlib import Path

_SENTENCES = [
    "What is 3 + 4? Answer with the number only.",
    "What is 12 + 19? Put the answer between <answer> and </answer>.",
    "<think> 12 + 19 is 31 </think> <answer> 31 </answer>",
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many in May. #### 72",
    "Write a short letter in lower case and end it with a question.",
    "You are a helpful assistant. Think step by step, then answer.",
]

# ChatML, the form SmolLM2 and Qwen use.
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tiny_model(folder: Path, *, seed: int = 0, chat_template: str | None = _CHAT_TEMPLATE) -> Path:
    """Write the model and its tokenizer to ``folder``, which is made when missing, and return it.

    Args:
        folder: where to write.
        seed: of the random weights.
        chat_template: None gives a tokenizer without one.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(_SENTENCES, trainer)
    # As with SmolLM2, the padding token is the end of turn: code that masks by `token != pad` must fail here.
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = chat_template

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # vLLM's CPU attention has no kernel for smaller heads
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        # Wide enough that the answers differ from token to token and from weight to weight.
        initializer_range=0.1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they were
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
