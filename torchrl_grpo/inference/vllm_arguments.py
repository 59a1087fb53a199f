"""The arguments of a vLLM engine, in the trainer's process and in a server, and of its requests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from torchrl_grpo.config import Config
from torchrl_grpo.config.values import VLLM_CPU_BLOCK_SIZE
from torchrl_grpo.errors import ModelError
from torchrl_grpo.inference.protocol import Request
from torchrl_grpo.models.precision import resolve_dtype, resolve_head

# The least of vLLM's defaults of max_num_batched_tokens, and the usual one.
_LEAST_STEP, _USUAL_STEP = 2048, 8192


def engine_options(
    cfg: Config, device: torch.device, max_num_seqs: int, gpu_memory_utilization: float, sleeps: bool = False
) -> dict[str, Any]:
    """Return the options of a configuration for an engine, by the names of :func:`vllm_arguments`."""
    options = cfg.inference_model
    return {
        "dtype": resolve_dtype(options.dtype, device),
        "head_dtype": resolve_head(options.head_dtype),
        "max_model_len": options.max_model_len,
        "max_num_seqs": max_num_seqs,
        "seed": cfg.seed,
        "gpu_memory_utilization": gpu_memory_utilization,
        "kv_cache_gib": options.kv_cache_gib,
        "block_size": options.block_size,
        "enforce_eager": options.enforce_eager,
        "enable_sleep": sleeps,
        "trust_remote_code": cfg.model.trust_remote_code,
        "engine_args": options.engine_args,
    }


def vllm_arguments(
    *,
    on_cpu: bool,
    dtype: torch.dtype,
    max_model_len: int,
    max_num_seqs: int,
    seed: int,
    gpu_memory_utilization: float,
    kv_cache_gib: int,
    block_size: int | None = None,
    enforce_eager: bool | None = None,
    head_dtype: torch.dtype | None = None,
    enable_sleep: bool = False,
    trust_remote_code: bool = False,
    engine_args: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the arguments by vLLM's names, without the model.

    Args:
        on_cpu: whether the engine computes on a CPU.
        dtype: data type of weights and activations.
        max_model_len: largest number of tokens of prompt and response together.
        max_num_seqs: largest number of responses decoded at a time.
        seed: seed of the engine; requests carry their own.
        gpu_memory_utilization: share of the GPU's memory that vLLM may take.
        kv_cache_gib: size of the key/value cache on CPU, in whole GiB.
        block_size: tokens per cache block, None for the smallest the device's kernels take.
        enforce_eager: None compiles on GPU and does not on CPU, where compiling takes minutes.
        head_dtype: data type of the output head's products and the logits; None for ``dtype``.
        enable_sleep: prepare for sleep (GPU only).
        trust_remote_code: whether code that comes with the model may run.
        engine_args: further arguments of vLLM's ``LLM``.
    """
    arguments: dict[str, Any] = dict(engine_args or {})
    # vLLM starts only if a step may compute a token of each response that is decoded at a time.
    step_tokens = arguments.get("max_num_batched_tokens")
    if step_tokens is None and max_num_seqs > _LEAST_STEP:
        arguments["max_num_batched_tokens"] = max(max_num_seqs, _USUAL_STEP)
    elif isinstance(step_tokens, int):
        max_num_seqs = min(max_num_seqs, step_tokens)
    if head_dtype is not None:
        # vLLM's layer for logits reads this entry of the model's configuration.
        arguments["hf_overrides"] = {**arguments.get("hf_overrides", {}), "head_dtype": name_of(head_dtype)}
    if on_cpu:
        arguments["kv_cache_memory_bytes"] = kv_cache_gib * 2**30
        arguments["block_size"] = block_size or VLLM_CPU_BLOCK_SIZE
    else:
        arguments["gpu_memory_utilization"] = gpu_memory_utilization
        arguments["enable_sleep_mode"] = enable_sleep
        if block_size is not None:
            arguments["block_size"] = block_size
    return arguments | {
        "dtype": name_of(dtype),
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "seed": seed,
        "enforce_eager": on_cpu if enforce_eager is None else enforce_eager,
        "enable_prefix_caching": True,
        # Raw log-probabilities are those of temperature 1, not of the sampled distribution.
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "trust_remote_code": trust_remote_code,
    }


def request_options(request: Request) -> dict[str, Any]:
    """Return how vLLM samples the response to a request, by the names of its ``SamplingParams``."""
    blocked = () if request.pictures is None else request.pictures.blocked
    return {
        "max_tokens": request.max_new_tokens,
        "temperature": request.temperature,
        "seed": request.seed,
        "logprobs": 0,
        "ignore_eos": request.ignore_eos,
        "stop_token_ids": list(request.stop_token_ids),
        "detokenize": False,
        # As far below the others as vLLM allows: their probability is 0 in float32.
        "logit_bias": dict.fromkeys(blocked, -100.0) or None,
    }


def check_prompt_tokens(request: Request, tokens: int) -> None:
    """Check the number of tokens that vLLM has made of a prompt.

    Raises:
        ModelError: the model's processor makes another number, which the trainer scores.
    """
    if tokens != len(request.tokens):
        raise ModelError(
            f"inference_model.backend: vLLM makes {tokens} tokens of a prompt with pictures of which the "
            f"processor of the model makes {len(request.tokens)}, so the trainer would score another prompt; "
            "write inference_model.backend=transformers"
        )


def as_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return arguments as words of a command line, e.g. ``--max-num-seqs 64`` or ``--no-enforce-eager``.

    An argument that is None is left out.
    """
    words: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            words += [f"--{flag}", *(str(item) for item in value)]
        elif value is not None:
            words += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    return words


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name, e.g. ``float32``."""
    return str(dtype).removeprefix("torch.")
