"""From the configuration to an engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchrl_grpo.config import Config
from torchrl_grpo.inference.protocol import SteppingEngine
from torchrl_grpo.models.loading import load_model
from torchrl_grpo.models.precision import resolve_dtype, resolve_head
from torchrl_grpo.planning.plan import SHARED_GPU


def build_engine(
    cfg: Config,
    source: str,
    device: torch.device,
    end_ids: Sequence[int],
    pad_id: int,
    max_num_seqs: int,
    sleeps: bool = False,
    gpu_memory_utilization: float = SHARED_GPU,
) -> SteppingEngine:
    """The engine ``inference_model.backend`` names, on ``device``, holding the weights at ``source``.

    Args:
        cfg: the run's configuration.
        source: folder or hub name.
        device: where it runs.
        end_ids: tokens that end a response.
        pad_id: padding id.
        max_num_seqs: most responses decoded at a time.
        sleeps: it will be told to sleep.
        gpu_memory_utilization: of the GPU's memory that vLLM takes, where it has one.
    """
    options = cfg.inference_model
    dtype = resolve_dtype(options.dtype, device)
    if options.backend == "transformers":
        from torchrl_grpo.inference.transformers_engine import TransformersEngine

        model = load_model(source, cfg.model, device, dtype)
        return TransformersEngine(model, end_ids, pad_id, head_dtype=resolve_head(options.head_dtype))
    from torchrl_grpo.inference.vllm_engine import VLLMEngine

    return VLLMEngine(
        source,
        device=device,
        dtype=dtype,
        head_dtype=resolve_head(options.head_dtype),
        max_model_len=options.max_model_len,
        max_num_seqs=max_num_seqs,
        seed=cfg.seed,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache_gib=options.kv_cache_gib,
        block_size=options.block_size,
        enforce_eager=options.enforce_eager,
        enable_sleep=sleeps,
        trust_remote_code=cfg.model.trust_remote_code,
        engine_args=options.engine_args,
    )
