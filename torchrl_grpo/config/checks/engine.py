"""Checks of servers, the devices of an engine, the way of weights, and ``inference_model.engine_args``.

Arguments of an engine that this project sets itself are refused. All others are passed to vLLM or SGLang
unchanged, which checks their names when the engine starts.
"""

from __future__ import annotations

import importlib
import os
import re
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from torchrl_grpo.config.checks.unread import check_unset
from torchrl_grpo.config.engines import ENGINES
from torchrl_grpo.config.keys import bad_value, show
from torchrl_grpo.runtime.files.socket_folder import LONGEST

if TYPE_CHECKING:
    from torchrl_grpo.config.schema import Config

_KEY = "inference_model.engine_args"
_STARTED = "the servers of inference_model.servers run already"
# Hosts that only this machine reaches.
LOOPBACK = ("localhost", "127.0.0.1", "::1")

# vLLM's tables, which its EngineKind.engine_args_rules names. Argument -> the key that sets it.
SET_BY_KEY = {
    "model": "model.name",
    "tokenizer": "model.name",
    "trust_remote_code": "model.trust_remote_code",
    "seed": "seed",
    "dtype": "inference_model.dtype",
    "max_model_len": "inference_model.max_model_len",
    "enforce_eager": "inference_model.enforce_eager",
    "gpu_memory_utilization": "inference_model.gpu_memory_utilization",
    "kv_cache_memory_bytes": "inference_model.kv_cache_gib",
    "block_size": "inference_model.block_size",
    "enable_sleep_mode": "inference_model.sleep",
    "device": "inference_model.devices",
    "host": "inference_model.servers",
    "port": "inference_model.servers",
    "uds": "inference_model.servers",
}
# Argument of vLLM with the same value in every run -> the value and the reason, for the error message.
ALWAYS_SET = {
    "max_num_seqs": "it follows from env.num_envs and env.repeats, the responses of a round",
    "enable_prefix_caching": "it is on, because the responses of a group share their prompt",
    "logprobs_mode": "it is processed_logprobs, because the numbers of what was sampled are trained on",
    "max_logprobs": "it is what the comparison after each publication needs",
    "disable_log_stats": "it is on, because the run has metrics of its own",
    "skip_tokenizer_init": "the engine takes and gives token ids in any case",
    "distributed_executor_backend": "the engine runs in its worker's own process, where weights reach it",
    "worker_cls": "weights reach the engine in the worker that vLLM has by itself",
    "worker_extension_cls": "it is the class that takes weights",
    "middleware": "it is the one that asks for the key",
    "api_key": "a server that the run starts has a random key, and VLLM_API_KEY is that of other servers",
}
# Argument of vLLM whose only valid value here is 1 -> what to write for more.
ONE_DEVICE = {
    "tensor_parallel_size": "inference_model.tensor_parallel_size",
    "pipeline_parallel_size": "inference_model.pipeline_parallel_size",
    "data_parallel_size": "inference_model.num_devices",
}


def with_keys(message: str) -> str:
    """Return a message of vLLM with keys in place of the options that this project sets by them."""
    return re.sub(r"--([a-z-]+)", lambda flag: SET_BY_KEY.get(flag[1].replace("-", "_"), flag[0]), message)


def check_engine_args(cfg: Config) -> None:
    """Check the arguments that are passed to vLLM or SGLang.

    Raises:
        ConfigError: the backend takes none, or this project sets an argument itself.
    """
    inference = cfg.inference_model
    if not inference.engine_args:
        return
    rules = inference.engine.engine_args_rules
    if rules is None:
        takers = dict.fromkeys(kind.program for kind in ENGINES.values() if kind.engine_args_rules)
        wrong = f"inference_model.backend={inference.backend} takes none, only {' and '.join(takers)} do"
        raise bad_value(_KEY, inference.engine_args, wrong, f"inference_model.backend=vllm or {_KEY}={{}}")
    if inference.servers != "auto":
        raise bad_value(_KEY, inference.engine_args, _STARTED, f"{_KEY}={{}}, and give them to grpo-serve")
    module = importlib.import_module(rules)
    by_key, always, one_device = module.SET_BY_KEY, module.ALWAYS_SET, module.ONE_DEVICE
    _check_overrides(inference.engine_args.get("hf_overrides", {}))
    _check_step(inference.engine_args, inference.max_model_len)
    for name, value in inference.engine_args.items():
        key = f"{_KEY}.{name}"
        if name in by_key:
            also = " on a CPU, and inference_model.gpu_memory_utilization on a GPU"
            wrong = f"{by_key[name]} sets it{also if name == 'kv_cache_memory_bytes' else ''}"
            raise bad_value(key, value, wrong, f"{by_key[name]}=VALUE in its place")
        if name in always:
            raise bad_value(key, value, always[name], f"nothing for {name}")
        if name in one_device and value != 1:
            fix = f"{one_device[name]}={value} in its place"
            raise bad_value(key, value, f"{one_device[name]} sets it", fix)


def _check_overrides(overrides: Any) -> None:
    key, fix = f"{_KEY}.hf_overrides", "inference_model.head_dtype"
    if not isinstance(overrides, dict):
        wrong = "it has entries of the model's configuration"
        raise bad_value(key, overrides, wrong, f"{key}={{NAME:VALUE}}")
    if "head_dtype" in overrides:
        key, value = f"{key}.head_dtype", overrides["head_dtype"]
        raise bad_value(key, value, f"{fix} sets it", f"{fix}=float32 in its place")


def _check_step(engine_args: dict[str, Any], longest: int) -> None:
    key = f"{_KEY}.max_num_batched_tokens"
    tokens, cuts = engine_args.get("max_num_batched_tokens"), engine_args.get("enable_chunked_prefill")
    if cuts is False and isinstance(tokens, int) and tokens < longest:
        wrong = f"prompts of up to inference_model.max_model_len={longest} tokens may not be cut"
        raise bad_value(key, tokens, wrong, f"{key}={longest} or {_KEY}.enable_chunked_prefill=true")


def check_servers(cfg: Config) -> None:
    """Check ``inference_model.servers``.

    Raises:
        ConfigError: it is neither ``auto`` nor a list of addresses, or it contradicts another key.
    """
    inference, key = cfg.inference_model, "inference_model.servers"
    servers = inference.servers
    if inference.engine.has_servers and cfg.ray.address is not None:
        fix = "inference_model.backend=vllm or ray.address=null"
        raise bad_value("ray.address", cfg.ray.address, "servers do not run on Ray", fix)
    if servers == "auto":
        return
    fix = f"{key}=[http://127.0.0.1:8000] or {key}=auto"
    if not isinstance(servers, list) or not servers or not all(isinstance(item, str) for item in servers):
        raise bad_value(key, servers, "it must be auto or a list of addresses", fix)
    if not inference.engine.has_servers:
        wrong = f"inference_model.backend={inference.backend} has no servers"
        raise bad_value(key, servers, wrong, f"inference_model.backend=vllm_server or {key}=auto")
    known: dict[str, str] = {}
    for address in servers:
        known.setdefault(_normal_address(address, servers, fix), address)
    if len(known) < len(servers):
        raise bad_value(key, servers, "it names a server twice", f"{key}={show(list(known.values()))}")
    if inference.num_devices not in ("auto", len(servers)):
        check_unset(cfg, "inference_model", "num_devices", f"{key} names {len(servers)} servers")
    check_unset(cfg, "inference_model", "devices", f"{_STARTED} and have their GPUs")


def check_transfer(cfg: Config) -> None:
    """Check ``inference_model.weight_transfer`` and the devices of one engine.

    Raises:
        ConfigError: the engines cannot take weights in this way, or cannot have several devices.
    """
    inference = cfg.inference_model
    size = inference.tensor_parallel_size * inference.pipeline_parallel_size
    several = "tensor" if inference.tensor_parallel_size > 1 else "pipeline"
    key = f"inference_model.{several}_parallel_size"
    value = attrgetter(key)(cfg)
    if size > 1 and not inference.engine.spans_devices:
        wrong = f"an engine of inference_model.backend={inference.backend} has one device"
        raise bad_value(key, value, wrong, f"inference_model.backend=vllm_server or {key}=1")
    if size > 1 and inference.servers != "auto":
        raise bad_value(key, value, f"{_STARTED} and have their GPUs", f"{key}=1, and give it to grpo-serve")
    for name, count in (
        ("num_devices", inference.num_devices),
        ("devices", None if inference.devices is None else len(inference.devices)),
    ):
        if size > 1 and isinstance(count, int) and count % size:
            wrong = f"each engine has {size} devices, because of {key}={value}"
            raise bad_value(f"inference_model.{name}", vars(inference)[name], wrong, f"a multiple of {size}")
    way, engine, served = inference.weight_transfer, inference.engine, inference.engine.has_servers
    key = "inference_model.weight_transfer"
    if way in ("cuda_ipc", "nccl") and served and not engine.takes_gpu_weights:
        raise bad_value(key, way, f"{engine.program}'s servers do not get weights in this way", f"{key}=auto")
    if way in ("shared_memory", "folder") and not served:
        wrong = f"only servers get weights in this way, and inference_model.backend={inference.backend}"
        raise bad_value(key, way, wrong, f"inference_model.backend=vllm_server or {key}=auto")
    if way in ("in_process", "ray_objects") and served:
        wrong = "a server is a process of its own, and does not run on Ray"
        raise bad_value(key, way, wrong, f"{key}=auto or inference_model.backend=vllm")
    if way == "folder" and inference.weight_folder is None:
        wrong = "inference_model.weight_folder names no folder that the trainer and the servers see"
        raise bad_value(key, way, wrong, "inference_model.weight_folder=/shared/weights, for example")


def _normal_address(address: str, servers: list[str], fix: str) -> str:
    """Return the same text for all spellings of an address."""
    try:
        parts = urlsplit(address)
        more = parts.query or parts.fragment or parts.username
        if parts.scheme == "unix" and not (parts.netloc or more):
            path = os.path.normpath(parts.path)
            if path.startswith("/") and len(os.fsencode(path)) <= LONGEST:
                return f"unix:{path}"
        elif parts.scheme in ("http", "https") and parts.hostname and parts.path in ("", "/") and not more:
            host = "127.0.0.1" if parts.hostname in LOOPBACK else parts.hostname
            return f"{parts.scheme}://{host}:{parts.port}"
    except ValueError:
        # The address has no valid host or port, and is refused below.
        pass
    wrong = f"{address!r} is no address, which is http://HOST:PORT or unix:/PATH"
    raise bad_value("inference_model.servers", servers, wrong, fix)
