"""Checks of SGLang's environment, and the arguments of SGLang that this project sets itself."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from torchrl_grpo.config.keys import bad_value
from torchrl_grpo.runtime.own_variables import inherited
from torchrl_grpo.runtime.paths import expanded

if TYPE_CHECKING:
    from torchrl_grpo.config.schema import Config

_KEY = "inference_model.server_python"
_FIX = f"{_KEY}=.venv-sglang/bin/python after scripts/setup_sglang.sh"
_WHY_NO_API_KEY = (
    "a server that the run starts gets a random key, and that of other servers is in SGLANG_API_KEY"
)

# Argument of SGLang -> the key that sets it.
SET_BY_KEY = {
    "model_path": "model.name",
    "tokenizer_path": "model.name",
    "trust_remote_code": "model.trust_remote_code",
    "random_seed": "seed",
    "dtype": "inference_model.dtype",
    "context_length": "inference_model.max_model_len",
    "mem_fraction_static": "inference_model.gpu_memory_utilization",
    "max_total_tokens": "inference_model.kv_cache_gib",
    "page_size": "inference_model.block_size",
    "cuda_graph_backend_decode": "inference_model.enforce_eager",
    "cuda_graph_backend_prefill": "inference_model.enforce_eager",
    "enable_fp32_lm_head": "inference_model.head_dtype",
    "device": "inference_model.devices",
    "host": "inference_model.servers",
    "port": "inference_model.servers",
    "uds": "inference_model.servers",
}
# Argument of SGLang that is not the user's to choose -> its value, or the reason, for the error message.
ALWAYS_SET = {
    "max_running_requests": "it follows from env.num_envs and env.repeats, the responses of a round",
    "disable_radix_cache": "the cache is on, because the responses of a group share their prompt",
    "skip_tokenizer_init": "the engine takes and gives token ids in any case",
    "sampling_defaults": "it is openai, so that nothing but the run's own keys changes what is sampled from",
    "preferred_sampling_params": "nothing but the run's own keys changes what is sampled from",
    "skip_server_warmup": "the run generates as soon as the server has its weights",
    "custom_weight_loader": "it is the function that takes weights",
    "quantization": "published weights are compared bit by bit with those that the server holds",
    "nnodes": "it is 1, because an engine has one device",
    "tokenizer_worker_num": "it is 1, because all requests pass through the process that names the weights",
    "api_key": _WHY_NO_API_KEY,
    "admin_api_key": _WHY_NO_API_KEY,
    "weight_version": "it is a name that the run gives with each publication",
}
# Argument of SGLang whose only valid value here is 1 -> what to write for more: more engines.
ONE_DEVICE = dict.fromkeys(("tp_size", "pp_size", "dp_size", "ep_size"), "inference_model.num_devices")


def python_of(python: str | None) -> Path:
    """Return the Python that runs SGLang.

    Args:
        python: value of ``inference_model.server_python``.

    Raises:
        ConfigError: ``inference_model.server_python`` is missing, or is no program.
    """
    if python is None:
        wrong = "SGLang needs an environment of its own, and this key names its Python"
        raise bad_value(_KEY, python, wrong, _FIX)
    # Not resolved: a virtual environment is found by the path of its link.
    path = expanded(python).absolute()
    if not path.is_file():
        raise bad_value(_KEY, python, "there is no such file", _FIX)
    return path


def check_python(cfg: Config) -> None:
    """Check that the Python of ``inference_model.server_python`` has SGLang, without importing it.

    Raises:
        ConfigError: it has not, or it does not run.
    """
    python = cfg.inference_model.server_python
    # The variables that the server gets, such as LD_LIBRARY_PATH. Modules that PYTHONPATH or, without -P, the
    # working directory would add are not of this Python's environment.
    environment = {name: value for name, value in inherited().items() if not name.startswith("PYTHON")}
    code = "import importlib.util, sys; sys.exit(3 if importlib.util.find_spec('sglang') is None else 0)"
    try:
        done = subprocess.run(
            [python_of(python), "-P", "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise bad_value(_KEY, python, f"it does not run ({error})", _FIX) from error
    if done.returncode == 3:
        raise bad_value(_KEY, python, "sglang is not installed there", _FIX)
    if done.returncode != 0:
        error_line = (done.stderr.strip() or "it printed nothing").splitlines()[-1]
        how = f"exit code {done.returncode}" if done.returncode > 0 else f"signal {-done.returncode}"
        raise bad_value(_KEY, python, f"it is no Python 3.11 or newer ({how}: {error_line})", _FIX)
