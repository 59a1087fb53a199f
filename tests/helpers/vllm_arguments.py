"""How tests start a vLLM on a CPU: with a small cache, and without what a process needs to do only once."""

from __future__ import annotations

import gc
import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from gc import freeze
from typing import Any

import pytest
import torch

ON_A_CPU: dict[str, Any] = {
    "device": torch.device("cpu"),
    "seed": 0,
    "gpu_memory_utilization": 0.4,
    "kv_cache_gib": 1,
}
TINY_ENGINE: dict[str, Any] = {
    **ON_A_CPU,
    "max_model_len": 64,
    "max_num_seqs": 4,
    # vLLM resets its cache block by block before each of hundreds of publications. Of a tiny model, a GiB has
    # more than a hundred thousand blocks.
    "engine_args": {"num_gpu_blocks_override": 64},
}


def import_here(model: Any) -> None:
    """Have vLLM look at its class for ``model`` in this process.

    By default vLLM starts a process for that, once for each class and machine, which takes 8 s of CPU time.
    """
    from vllm.model_executor.models.registry import ModelRegistry, _LazyRegisteredModel

    for name in (type(model).__name__, "TransformersForCausalLM"):
        known = ModelRegistry.models.get(name)
        if isinstance(known, _LazyRegisteredModel):
            ModelRegistry.register_model(name, known.load_model_cls())


def keep_heap() -> None:
    """Keep what vLLM has imported out of garbage collections, of which an engine has ten, of half a second.

    No engine may be alive: it would never be collected.
    """
    gc.collect()
    freeze()


@contextmanager
def quick_engines() -> Iterator[None]:
    """Spare the engines of a process what one of them has done for all. No engine may be alive at the start.

    vLLM gives all that is frozen back to garbage collections when an engine ends, and looks for kernels of
    Triton in all modules when one begins. Both take seconds of a core for each engine.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("freeze", "unfreeze"):
            patch.setattr(gc, name, lambda: None)
        # Older releases have no such kernels.
        if importlib.util.find_spec("vllm.triton_utils.dispatcher") is not None:
            dispatcher = importlib.import_module("vllm.triton_utils.dispatcher")
            platform = importlib.import_module("vllm.platforms.cpu").CpuPlatform
            register = platform.register_triton_kernel_overrides

            def register_once() -> None:
                if not dispatcher._registry:
                    register()

            patch.setattr(platform, "register_triton_kernel_overrides", staticmethod(register_once))
        keep_heap()
        yield
