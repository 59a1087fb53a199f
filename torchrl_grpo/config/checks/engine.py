"""Checks of ``inference_model.engine_args``, which refuse the arguments that this project sets itself.

All other arguments are passed to vLLM unchanged. vLLM checks their names when the engine starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrl_grpo.config.keys import bad_value

if TYPE_CHECKING:
    from torchrl_grpo.config.schema import Config

_KEY = "inference_model.engine_args"

# Argument of vLLM -> the key that sets it.
SET_BY_KEY = {
    "model": "model.name",
    "tokenizer": "model.name",
    "trust_remote_code": "model.trust_remote_code",
    "seed": "seed",
    "dtype": "inference_model.dtype",
    "max_model_len": "inference_model.max_model_len",
    "max_num_seqs": "env.num_envs",
    "enforce_eager": "inference_model.enforce_eager",
    "gpu_memory_utilization": "inference_model.gpu_memory_utilization",
    "kv_cache_memory_bytes": "inference_model.kv_cache_gib",
    "block_size": "inference_model.block_size",
    "enable_sleep_mode": "inference_model.sleep",
    "device": "inference_model.devices",
}
# Argument of vLLM with the same value in every run -> the value and the reason, for the error message.
ALWAYS_SET = {
    "enable_prefix_caching": "it is on: the responses of a group share their prompt",
    "logprobs_mode": "it is processed_logprobs: the numbers of what was sampled are trained on",
    "max_logprobs": "it is vLLM's own 20: so many are compared after each publication",
    "disable_log_stats": "it is on: the run has metrics of its own",
    "skip_tokenizer_init": "the engine takes and gives token ids in any case",
    "distributed_executor_backend": "the engine runs in its worker's own process, where weights reach it",
    "worker_cls": "weights reach the engine in the worker that vLLM has by itself",
}
# Only the value 1 works for these arguments, because an engine has one device.
ONE_DEVICE = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def check_engine_args(cfg: Config) -> None:
    """Check the arguments that are passed to vLLM.

    Raises:
        ConfigError: the backend is not vLLM, or this project sets an argument itself.
    """
    inference = cfg.inference_model
    if not inference.engine_args:
        return
    if inference.backend != "vllm":
        wrong = f"only vllm takes these, and inference_model.backend={inference.backend}"
        raise bad_value(_KEY, inference.engine_args, wrong, f"inference_model.backend=vllm or {_KEY}={{}}")
    _check_overrides(inference.engine_args.get("hf_overrides", {}))
    for name, value in inference.engine_args.items():
        key = f"{_KEY}.{name}"
        if name in SET_BY_KEY:
            fix = SET_BY_KEY[name]
            also = (
                " on a CPU, and inference_model.gpu_memory_utilization sets it on a GPU"
                if name == "kv_cache_memory_bytes"
                else ""
            )
            raise bad_value(key, value, f"{fix} sets this for the whole run{also}", f"{fix}=VALUE")
        if name in ALWAYS_SET:
            raise bad_value(key, value, ALWAYS_SET[name], f"nothing for {name}")
        if name in ONE_DEVICE and value != 1:
            wrong = "an engine has one device, and several devices have an engine each"
            raise bad_value(key, value, wrong, "inference_model.num_devices=2, for example,")


def _check_overrides(overrides: Any) -> None:
    key = f"{_KEY}.hf_overrides"
    if not isinstance(overrides, dict):
        raise bad_value(
            key, overrides, "these are entries of the model's configuration", f"{key}={{NAME: VALUE}}"
        )
    if "head_dtype" in overrides:
        fix = "inference_model.head_dtype"
        raise bad_value(
            f"{key}.head_dtype",
            overrides["head_dtype"],
            f"{fix} sets this for the whole run",
            f"{fix}=float32",
        )
