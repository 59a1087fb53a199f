"""Tiny random models of many families: how each is built, and what the trial must say of it."""

from __future__ import annotations

from typing import Any

import torch
from batches import FLOAT32
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 97
SHARED, PLAIN = "prompt once", "prompt once per response"

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# GPT-2 and those after it call the same by other names, and do without some.
_OWN_NAMES: tuple[str, ...] = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_OWN_NAMES += ("num_key_value_heads", "max_position_embeddings")
_GPT = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}
_HEAD = {"head_dim": 8}
_W = {"sliding_window": 7}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_local_experts": 4}
_GROUPED = {**_MOE, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_LATENT = {**_GROUPED, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
_LATENT |= {"v_head_dim": 12, "num_key_value_heads": 4}
_INDEXED = {**_LATENT, "index_topk": 7, "index_n_heads": 2, "index_head_dim": 16}
_LINEAR = {"head_dim": 16, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
_LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
_SHARED_EXPERT = {**_MOE, "shared_expert_intermediate_size": 24}
_MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_QWEN_WINDOW = {"use_sliding_window": True, **_W}

# name: model type, settings beside the common ones, and the path, or why it is refused.
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama", {}, SHARED),
    "llama tied": ("llama", {"tie_word_embeddings": True}, SHARED),
    "mistral": ("mistral", {"sliding_window": None}, SHARED),
    "mistral window": ("mistral", _W, SHARED),
    "ministral": ("ministral", {**_W, **_HEAD}, SHARED),
    "mixtral": ("mixtral", {**_MOE, **_W}, SHARED),
    "qwen2": ("qwen2", {}, SHARED),
    "qwen2 window": ("qwen2", {**_QWEN_WINDOW, "max_window_layers": 1}, SHARED),
    "qwen3": ("qwen3", {"head_dim": 16}, SHARED),
    "qwen3-moe": ("qwen3_moe", {**_MOE, "head_dim": 16}, SHARED),
    "qwen2-moe": ("qwen2_moe", _SHARED_EXPERT, SHARED),
    "qwen2-moe window": ("qwen2_moe", {**_SHARED_EXPERT, **_QWEN_WINDOW, "max_window_layers": 3}, PLAIN),
    "gemma": ("gemma", {"head_dim": 16}, SHARED),
    "gemma2": ("gemma2", {"head_dim": 16, **_W}, PLAIN),
    "gemma3": ("gemma3_text", {"head_dim": 16, **_W, **_MIXED}, SHARED),
    "gemma3n": (
        "gemma3n_text",
        {
            "head_dim": 16,
            **_W,
            **_MIXED,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "laurel_rank": 4,
            "num_kv_shared_layers": 0,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0] * 3,
        },
        SHARED,
    ),
    "gemma4": (
        "gemma4_text",
        {"head_dim": 16, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 16, **_W},
        SHARED,
    ),
    "phi": ("phi", {}, SHARED),
    "phi3 window": ("phi3", _W, SHARED),
    "phimoe": ("phimoe", _MOE, SHARED),
    "phimoe window": ("phimoe", {**_MOE, **_W}, PLAIN),
    "smollm3 window": ("smollm3", {**_QWEN_WINDOW, "no_rope_layer_interval": 3}, SHARED),
    "olmo": ("olmo", {}, SHARED),
    "olmo2": ("olmo2", {}, SHARED),
    "olmo3": ("olmo3", _W, SHARED),
    "olmoe": ("olmoe", _MOE, SHARED),
    "gpt-neox": ("gpt_neox", {}, SHARED),
    "gpt2": ("gpt2", _GPT, SHARED),
    "bigcode": ("gpt_bigcode", _GPT, SHARED),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}, SHARED),
    "starcoder2": ("starcoder2", _W, SHARED),
    "glm": ("glm", _HEAD, SHARED),
    "glm4": ("glm4", _HEAD, SHARED),
    "glm4-moe": ("glm4_moe", {**_GROUPED, **_HEAD, "n_shared_experts": 1}, SHARED),
    "deepseek-v2": ("deepseek_v2", {**_LATENT, "topk_method": "greedy"}, SHARED),
    "deepseek-v3": ("deepseek_v3", _LATENT, SHARED),
    "minimax-m2": ("minimax_m2", {**_MOE, **_HEAD, "rotary_dim": 4}, SHARED),
    "exaone4": ("exaone4", {**_W, **_HEAD, "sliding_window_pattern": 2}, SHARED),
    "ernie4.5": ("ernie4_5", {}, SHARED),
    "hunyuan": ("hunyuan_v1_dense", _HEAD, SHARED),
    "seed-oss": ("seed_oss", _HEAD, SHARED),
    "apertus": ("apertus", {}, SHARED),
    "arcee": ("arcee", {}, SHARED),
    "helium": ("helium", _HEAD, SHARED),
    "jetmoe": ("jetmoe", {**_MOE, "kv_channels": 8}, SHARED),
    "cohere": ("cohere", {"logit_scale": 0.25}, SHARED),
    "cohere2": ("cohere2", {"logit_scale": 0.25, **_W}, SHARED),
    "granite": (
        "granite",
        {"logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
        SHARED,
    ),
    "granite-moe": ("granitemoe", {**_MOE, "logits_scaling": 2.0}, SHARED),
    "lfm2": ("lfm2", {"layer_types": ["full_attention"] * 3}, SHARED),
    "lfm2 conv": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, PLAIN),
    "gpt-oss": ("gpt_oss", {**_MOE, **_HEAD, **_W}, PLAIN),
    "llama4": (
        "llama4_text",
        {**_MOE, **_HEAD, "num_experts_per_tok": 1, "attention_chunk_size": 8, "intermediate_size_mlp": 48},
        PLAIN,
    ),
    "qwen3-next": ("qwen3_next", {**_SHARED_EXPERT, **_LINEAR}, PLAIN),
    "jamba": (
        "jamba",
        {
            **_MOE,
            "mamba_d_state": 4,
            "use_mamba_kernels": False,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
        },
        PLAIN,
    ),
    "falcon-h1": (
        "falcon_h1",
        {
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_n_groups": 1,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
            "lm_head_multiplier": 0.5,
        },
        PLAIN,
    ),
    "mamba": ("mamba", {"state_size": 4}, PLAIN),
    "falcon": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False}, PLAIN),
    "bloom": ("bloom", {"hidden_size": 32, "n_layer": 3, "n_head": 4}, PLAIN),
    "gpt-j": ("gptj", {**_GPT, "rotary_dim": 4}, PLAIN),
    "gpt-neo": (
        "gpt_neo",
        {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "window_size": 7,
            "max_position_embeddings": 256,
            "attention_types": [[["global", "local"], 1]],
        },
        PLAIN,
    ),
    "stablelm": ("stablelm", {"use_qkv_bias": True}, PLAIN),
    "nemotron": ("nemotron", {}, PLAIN),
    "doge": ("doge", {}, PLAIN),
    "recurrent-gemma": (
        "recurrent_gemma",
        {"lru_width": 32, "attention_window_size": 7},
        "padding changes its log-probabilities",
    ),
    "deepseek-v3.2": ("deepseek_v32", _INDEXED, "padding changes its log-probabilities"),
    "glm-moe-dsa": ("glm_moe_dsa", _INDEXED, "padding changes its log-probabilities"),
    "modernbert-decoder": ("modernbert-decoder", {"local_attention": 14}, "its logits differ by"),
}
_OTHER_NAMES = ("gpt2", "gpt_bigcode", "gptj", "bloom", "gpt_neo")

# As above, trained with gradient checkpointing.
RECOMPUTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "mixtral with noise": ("mixtral", {**_MOE, "router_jitter_noise": 0.1}, SHARED),
    "phimoe with noise": ("phimoe", {**_MOE, "input_jitter_noise": 0.1}, SHARED),
    "llama with dropout": ("llama", {"attention_dropout": 0.5}, SHARED),
    "gpt2 with dropout": ("gpt2", {**_GPT, "attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}, SHARED),
    "jetmoe": ("jetmoe", {**_MOE, "kv_channels": 8}, "write train_model.gradient_checkpointing=false"),
}


def build(kind: str, settings: dict[str, Any]) -> PreTrainedModel:
    """A random model in evaluation mode and PyTorch's default format, whose norms and biases do something."""
    common = {k: v for k, v in _COMMON.items() if kind not in _OTHER_NAMES or k not in _OWN_NAMES}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **{**common, **settings})
        model = AutoModelForCausalLM.from_config(config, dtype=FLOAT32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, dtype=FLOAT32)
                parameter.add_((0.1 if parameter.ndim < 2 else 0.05) * noise)
    return in_default_format(model)


def in_default_format(model: Any) -> PreTrainedModel:
    """Convert to PyTorch's default format; products of several experts at a time do not know float64."""
    model = model.to(torch.get_default_dtype())
    if model.dtype == torch.float64:
        for module in model.modules():
            if hasattr(module, "config") and hasattr(module.config, "_experts_implementation"):
                module.config._experts_implementation = "eager"
    return model
