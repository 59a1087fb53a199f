"""How an SGLang server that this project can use is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from torchrl_grpo.config import Config
from torchrl_grpo.config.checks.sglang import python_of
from torchrl_grpo.inference.servers.launch import Launch
from torchrl_grpo.inference.servers.sglang import program
from torchrl_grpo.inference.servers.sglang.messages import LOADER
from torchrl_grpo.inference.vllm_arguments import as_flags, name_of
from torchrl_grpo.models.precision import resolve_dtype, resolve_head
from torchrl_grpo.models.shape import ModelShape, read_shape
from torchrl_grpo.planning.memory import cache_of
from torchrl_grpo.planning.prediction import GIB


def sglang_launch(
    cfg: Config, source: str, device: torch.device, *, max_num_seqs: int, gpu_memory_utilization: float
) -> Launch:
    """Return how a server is started.

    Args:
        cfg: configuration of the run.
        source: folder or hub name of the model.
        device: device of the server.
        max_num_seqs: largest number of responses decoded at a time.
        gpu_memory_utilization: share of the GPU's memory that SGLang takes; unused on a CPU.
    """
    on_cpu = device.type == "cpu"
    arguments = sglang_arguments(
        cfg, device, max_num_seqs=max_num_seqs, gpu_memory_utilization=gpu_memory_utilization
    )
    # With -P, the folder of this project's program is not searched for modules.
    start = [str(python_of(cfg.inference_model.server_python)), "-P", str(Path(program.__file__).resolve())]
    # SGLang's parser takes a switch alone or not at all.
    flags = {name: value for name, value in arguments.items() if value is not False}
    words = [*start, *as_flags({"model_path": source, **flags})]
    return Launch(words, _variables(on_cpu, cfg.collector.timeout_s), ("TMPDIR",))


def sglang_arguments(
    cfg: Config, device: torch.device, *, max_num_seqs: int, gpu_memory_utilization: float
) -> dict[str, Any]:
    """Return the arguments by SGLang's names, without the model; see :func:`sglang_launch`."""
    options, on_cpu = cfg.inference_model, device.type == "cpu"
    dtype = resolve_dtype(options.dtype, device)
    arguments: dict[str, Any] = dict(options.engine_args)
    if on_cpu:
        arguments |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "max_total_tokens": _cached_tokens(cfg, dtype, max_num_seqs),
        }
    else:
        # With it, SGLang honors the seeds of requests.
        arguments.setdefault("enable_deterministic_inference", True)
        arguments["mem_fraction_static"] = gpu_memory_utilization
    if on_cpu if options.enforce_eager is None else options.enforce_eager:
        arguments |= {"cuda_graph_backend_decode": "disabled", "cuda_graph_backend_prefill": "disabled"}
    if options.block_size is not None:
        arguments["page_size"] = options.block_size
    return arguments | {
        "dtype": name_of(dtype),
        "enable_fp32_lm_head": resolve_head(options.head_dtype) is torch.float32
        and dtype is not torch.float32,
        "context_length": options.max_model_len,
        "max_running_requests": max_num_seqs,
        "random_seed": cfg.seed,
        "trust_remote_code": cfg.model.trust_remote_code,
        # Token ids in, token ids out.
        "skip_tokenizer_init": True,
        # A model's own defaults, such as top_k, would change the distribution that is sampled from.
        "sampling_defaults": "openai",
        "skip_server_warmup": True,
        "custom_weight_loader": LOADER,
        "log_level_http": "warning",
    }


def _cached_tokens(cfg: Config, dtype: torch.dtype, max_num_seqs: int) -> int:
    """Return the number of tokens whose keys and values fit into ``inference_model.kv_cache_gib``."""
    options, shape = cfg.inference_model, read_shape(cfg.model)
    if not isinstance(shape, ModelShape):
        return max_num_seqs * options.max_model_len
    tokens = int(options.kv_cache_gib * GIB / cache_of(shape, dtype.itemsize, 1))
    return max(tokens, 2 * options.max_model_len)


def _variables(on_cpu: bool, timeout_s: float) -> dict[str, str]:
    variables = {
        # This project's environment has packages of other versions.
        "PYTHONPATH": "",
        # A connection that is not used for some seconds is one of a trainer that trains.
        "SGLANG_TIMEOUT_KEEP_ALIVE": "3600",
        # With it, /health answers at once, also while the server is paused. /health_generate gives up after
        # the seconds below.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "SGLANG_HEALTH_CHECK_TIMEOUT": str(max(20, int(timeout_s))),
    }
    if on_cpu:
        variables |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            # Without this, angles of positions are rounded to the weights' format.
            "SGLANG_ROPE_CACHE_FP32": "1",
            # Compiling small helpers takes longer than it gains.
            "TORCH_COMPILE_DISABLE": "1",
        }
    return variables
