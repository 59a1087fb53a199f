"""How a vLLM server that this project can use is started."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from torchrl_grpo.inference.servers.launch import Launch
from torchrl_grpo.inference.vllm_arguments import as_flags
from torchrl_grpo.inference.vllm_compat import has_token_server, sampler_variables
from torchrl_grpo.planning.cores import import_path

_PROGRAM = "torchrl_grpo.inference.servers.vllm.program"
_EXTENSION = "torchrl_grpo.inference.servers.vllm.extension.WeightExtension"
_MIDDLEWARE = "torchrl_grpo.inference.servers.require_key.RequireKey"
_OLDER_ROUTES = "torchrl_grpo.inference.servers.vllm.older_routes.OlderRoutes"


def vllm_launch(source: str, arguments: Mapping[str, Any], *, on_cpu: bool) -> Launch:
    """Return how a server is started.

    Args:
        source: folder or hub name of the model.
        arguments: result of :func:`~torchrl_grpo.inference.vllm_arguments.vllm_arguments`.
        on_cpu: whether it computes on a CPU.
    """
    variables = _variables(arguments["enforce_eager"], on_cpu)
    return Launch(_command(source, arguments), variables, ("VLLM_RPC_BASE_PATH", "TMPDIR"))


def _command(source: str, arguments: Mapping[str, Any]) -> list[str]:
    flags = dict(arguments)
    # An option without a value.
    sleeps = flags.pop("enable_sleep_mode", False)
    return [
        sys.executable,
        # Python does not look for modules in the working directory, where a user may have a math.py.
        "-P",
        "-m",
        _PROGRAM,
        *as_flags({"model": source, **flags}),
        *(["--enable-sleep-mode"] if sleeps else []),
        # Token ids in, token ids out.
        *(["--enable-scale-out"] if has_token_server() else ["--middleware", _OLDER_ROUTES]),
        # No limit: vLLM counts the sampled token in addition to those that the probe asks for.
        *as_flags({"max_logprobs": -1}),
        # Verification needs the number of prompt tokens that came from the prefix cache.
        "--enable-prompt-tokens-details",
        "--disable-uvicorn-access-log",
        # The last middleware comes before all others.
        *as_flags({"worker_extension_cls": _EXTENSION, "middleware": _MIDDLEWARE}),
    ]


def _variables(eager: bool, on_cpu: bool) -> dict[str, str]:
    variables = {
        # Without this, vLLM has no routes to pause, to load weights and to call the worker.
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # A connection is idle while the trainer trains, so do not close it.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",
        # A clone that is not installed is imported from where this process has it.
        "PYTHONPATH": os.pathsep.join(import_path()),
    }
    if on_cpu:
        # vLLM would give all but one core of the machine to every server.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # The engine's process also computes the model. A worker process would cost memory, and the engine
        # would wait for its results in a loop that takes a core. Engines of several ranks ignore this.
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if eager:
            # Compiling vLLM's small helpers takes half a minute of the first request, and gains nothing.
            variables["TORCH_COMPILE_DISABLE"] = "1"
    else:
        # Without this, Triton's attention in float32 uses TF32 (10 mantissa bits, not 23).
        variables["TRITON_F32_DEFAULT"] = "ieee"
        variables |= sampler_variables()
    return variables
