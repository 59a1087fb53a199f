"""Builds the engine that a configuration names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchrl_grpo.config import Config
from torchrl_grpo.inference.protocol import SteppingEngine
from torchrl_grpo.inference.vllm_arguments import vllm_arguments
from torchrl_grpo.models.loading import load_model
from torchrl_grpo.models.precision import resolve_dtype, resolve_head
from torchrl_grpo.planning.plan import SHARED_GPU


def build_engine(
    cfg: Config,
    source: str,
    device: torch.device,
    eos_token_ids: Sequence[int],
    pad_token_id: int,
    max_num_seqs: int,
    sleeps: bool = False,
    gpu_memory_utilization: float = SHARED_GPU,
) -> SteppingEngine:
    """Build the engine of ``inference_model.backend`` on ``device`` with the weights at ``source``.

    Args:
        cfg: configuration of the run.
        source: folder or hub name of the model.
        device: device of the engine.
        eos_token_ids: tokens that end a response.
        pad_token_id: token that fills the left of short prompts.
        max_num_seqs: largest number of responses decoded at a time.
        sleeps: whether :meth:`Engine.sleep` will be called.
        gpu_memory_utilization: share of the GPU's memory that vLLM takes; unused on a CPU.
    """
    options = cfg.inference_model
    if options.backend == "transformers":
        from torchrl_grpo.inference.transformers_engine import TransformersEngine

        model = load_model(source, cfg.model, device, resolve_dtype(options.dtype, device))
        return TransformersEngine(
            model, eos_token_ids, pad_token_id, head_dtype=resolve_head(options.head_dtype)
        )
    from torchrl_grpo.inference.vllm_engine import VLLMEngine

    return VLLMEngine(
        source, device=device, **_vllm_options(cfg, device, max_num_seqs, gpu_memory_utilization, sleeps)
    )


def server_arguments(
    cfg: Config, device: torch.device, max_num_seqs: int, gpu_memory_utilization: float
) -> dict[str, Any]:
    """Return vLLM's arguments for a server, as :func:`build_engine` gives them to an engine of this process.

    Args:
        cfg: configuration of the run.
        device: device of the server.
        max_num_seqs: largest number of responses decoded at a time.
        gpu_memory_utilization: share of the GPU's memory that vLLM takes; unused on a CPU.
    """
    arguments = vllm_arguments(
        on_cpu=device.type == "cpu", **_vllm_options(cfg, device, max_num_seqs, gpu_memory_utilization)
    )
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if (size := vars(cfg.inference_model)[name]) > 1:
            arguments[name] = size
    return arguments


def _vllm_options(
    cfg: Config, device: torch.device, max_num_seqs: int, gpu_memory_utilization: float, sleeps: bool = False
) -> dict[str, Any]:
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
