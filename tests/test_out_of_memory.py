"""Memory that runs out is told from other errors, and ends a run with what to change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchrl_grpo.errors import TrainingStopped
from torchrl_grpo.inference.vllm_engine import VLLMEngine
from torchrl_grpo.out_of_memory import ran_out_of_memory, stopping

# As torch, cuBLAS, vLLM's allocator, torch on a CPU and Python say it.
OUT = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA Error: out of memory at /src/csrc/cumem_allocator.cpp:139"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 80 bytes"),
    MemoryError(),
]
OTHERS = [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("out of memory")]


@pytest.mark.parametrize("error", OUT, ids=lambda error: str(error)[:30] or "MemoryError")
def test_memory_that_ran_out_ends_with_the_message(error: Exception) -> None:
    assert ran_out_of_memory(error)
    with pytest.raises(TrainingStopped, match=r"^lower this$") as caught, stopping("lower this"):
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_other_errors_pass_as_they_are(error: Exception) -> None:
    assert not ran_out_of_memory(error)
    with pytest.raises(type(error)) as caught, stopping("lower this"):
        raise error
    assert caught.value is error


def test_an_engine_that_finds_its_memory_taken_says_which_share_to_lower() -> None:
    class Full:
        def wake_up(self) -> None:
            raise OUT[2]

    engine: Any = object.__new__(VLLMEngine)
    engine.llm, engine._share = Full(), 0.55
    with pytest.raises(TrainingStopped, match=r"inference_model\.gpu_memory_utilization=0\.55"):
        engine.wake()
