"""The engines: what each can do, and where it is built. This is the only place where they are registered.

All other code asks the record of an engine what it can do, and compares no names. Functions and objects are
given as ``PACKAGE.MODULE:NAME``, as in :mod:`~torchrl_grpo.config.builtin`, and imported when they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torchrl_grpo.config.keys import bad_value
from torchrl_grpo.config.values import KEY_VARIABLE, SGLANG_KEY_VARIABLE

# Default of inference_model.backend.
DEFAULT_ENGINE = "vllm"


@dataclass(frozen=True)
class EngineKind:
    """An engine that ``inference_model.backend`` can name.

    Attributes:
        name: value of ``inference_model.backend``.
        program: name of the program that generates, for messages.
        help: words about the engine for ``--help``; empty if its name says enough.
        build: function that builds it in a process of the run, called as
            :func:`~torchrl_grpo.inference.build.build_engine` is; None if only servers have it.
        servers: its :class:`~torchrl_grpo.inference.servers.kinds.ServerKind`; None if it has no servers.
        api_key_variable: environment variable with the key of its servers.
        package: package that must be installed; None if this project depends on it. It also names the engine
            in ``allocation_mode``.
        has_own_python: whether the package is in an environment of its own, whose Python
            ``inference_model.server_python`` names.
        engine_args_rules: module that says which entries of ``inference_model.engine_args`` are refused, in
            the tables ``SET_BY_KEY``, ``ALWAYS_SET`` and ``ONE_DEVICE``; None if it takes no entries.
        needs_gpu: function that returns whether the installed package runs on GPUs only; None if it never
            does.
        least_temperature: temperature below which it samples at this one.
        preallocates: whether it takes memory for its cache when it starts: a share of a GPU, or
            ``inference_model.kv_cache_gib`` of a CPU's memory.
        has_known_needs: whether the planner knows the least memory with which it starts. It can then choose
            the share of a GPU, and the number of responses that are decoded at a time.
        sleeps_on_gpu: whether it sleeps on GPUs only, with an allocator of its own, and by default if it
            shares the trainer's GPU. Others sleep anywhere, if ``inference_model.sleep`` asks for it.
        owns_process: whether, inside the trainer's process, it can run on the process's first GPU only, and
            cannot share a process with several training ranks.
        import_gib: memory that importing it takes in the trainer's process, in GiB.
        spans_devices: whether several devices can share the model of one engine.
        takes_gpu_weights: whether its servers take weights through a GPU's memory or NCCL.
        has_job_servers: whether a job of several nodes can start its servers.
        takes_pictures: whether prompts can have pictures.
        is_reference: whether it is the numerical reference, which runs everywhere and copies weights without
            a loader.
    """

    name: str
    program: str
    help: str = ""
    build: str | None = None
    servers: str | None = None
    api_key_variable: str = ""
    package: str | None = None
    has_own_python: bool = False
    engine_args_rules: str | None = None
    needs_gpu: str | None = None
    least_temperature: float = 0.0
    preallocates: bool = False
    has_known_needs: bool = False
    sleeps_on_gpu: bool = False
    owns_process: bool = False
    import_gib: float = 0.0
    spans_devices: bool = False
    takes_gpu_weights: bool = False
    has_job_servers: bool = False
    takes_pictures: bool = True
    is_reference: bool = False

    @property
    def has_servers(self) -> bool:
        """Whether it generates in servers, over HTTP."""
        return self.servers is not None


_INFERENCE = "torchrl_grpo.inference"
# What vLLM is in a process of the run and in servers.
_VLLM = EngineKind(
    "vllm",
    "vLLM",
    build=f"{_INFERENCE}.vllm_engine:build",
    package="vllm",
    engine_args_rules="torchrl_grpo.config.checks.engine",
    needs_gpu="torchrl_grpo.runtime.hardware:vllm_needs_gpu",
    # vLLM raises a lower temperature to this one, so its log-probabilities would be of another distribution.
    least_temperature=0.01,
    preallocates=True,
    has_known_needs=True,
    sleeps_on_gpu=True,
    owns_process=True,
    # Measured on Linux with torch 2.13.
    import_gib=0.2,
)
_KINDS = (
    _VLLM,
    replace(
        _VLLM,
        # owns_process, sleeps_on_gpu and import_gib are of an engine in the trainer's process, where a server
        # never is.
        name="vllm_server",
        help="vLLM in processes of its own, over HTTP",
        build=None,
        servers=f"{_INFERENCE}.servers.kinds:VLLM",
        api_key_variable=KEY_VARIABLE,
        spans_devices=True,
        takes_gpu_weights=True,
        has_job_servers=True,
    ),
    EngineKind(
        "sglang_server",
        "SGLang",
        help="the same with SGLang",
        servers=f"{_INFERENCE}.servers.kinds:SGLANG",
        api_key_variable=SGLANG_KEY_VARIABLE,
        package="sglang",
        has_own_python=True,
        engine_args_rules="torchrl_grpo.config.checks.sglang",
        preallocates=True,
        takes_pictures=False,
    ),
    EngineKind(
        "transformers",
        "transformers",
        help="runs everywhere, slower",
        build=f"{_INFERENCE}.transformers_engine:build",
        is_reference=True,
    ),
)
#: Value of ``inference_model.backend`` -> its engine.
ENGINES = {kind.name: kind for kind in _KINDS}


def engine_kind(name: str) -> EngineKind:
    """Return the engine of a value of ``inference_model.backend``.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in ENGINES:
        wrong = f"it must be one of {', '.join(ENGINES)}"
        fix = f"inference_model.backend={DEFAULT_ENGINE}, for example"
        raise bad_value("inference_model.backend", name, wrong, fix)
    return ENGINES[name]


def engines_with(can: Callable[[EngineKind], object]) -> list[str]:
    """Return the names of the engines of which ``can`` is true, in the order of the table."""
    return [name for name, kind in ENGINES.items() if can(kind)]


def reference_engine() -> str:
    """Return the name of the engine that runs everywhere."""
    return engines_with(lambda kind: kind.is_reference)[0]


def described() -> str:
    """Return the names of all engines, each with its help."""
    *first, last = (f"{name} ({kind.help})" if kind.help else name for name, kind in ENGINES.items())
    return f"{', '.join(first)}, or {last}"
