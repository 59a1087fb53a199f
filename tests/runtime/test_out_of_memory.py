"""Memory that runs out is told from other errors, and ends a run with what to change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import Runner, config, train  # noqa: F401  fixtures
from transformers import AutoModelForCausalLM

from torchrl_grpo.config import Config
from torchrl_grpo.config.values import Autocast, Dtype
from torchrl_grpo.errors import TrainingStopped
from torchrl_grpo.inference.vllm_engine import VLLMEngine
from torchrl_grpo.models.build import build_model
from torchrl_grpo.models.loading import load_model
from torchrl_grpo.models.reference import load_reference
from torchrl_grpo.runtime.oom import ran_out_of_memory, stop_on_oom

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
    with pytest.raises(TrainingStopped, match=r"^lower this$") as caught, stop_on_oom("lower this"):
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_other_errors_pass_as_they_are(error: Exception) -> None:
    assert not ran_out_of_memory(error)
    with pytest.raises(type(error)) as caught, stop_on_oom("lower this"):
        raise error
    assert caught.value is error


def test_an_engine_that_finds_its_memory_taken_says_which_share_to_lower() -> None:
    class Full:
        def wake_up(self, tags: list[str] | None) -> None:
            raise OUT[2]

    engine: Any = object.__new__(VLLMEngine)
    engine.llm, engine._gpu_memory_utilization, engine._asleep = Full(), 0.55, {"weights", "kv_cache"}
    with pytest.raises(TrainingStopped, match=r"inference_model\.gpu_memory_utilization=0\.55"):
        engine.wake()


@pytest.mark.parametrize(
    ("role", "key"),
    [
        ("trainer", "train_model.lora.rank=16"),
        ("adapters", "train_model.quantization=nf4"),
        ("reference", "ref_model.dtype=bfloat16"),
        ("any", "model.name"),
    ],
)
def test_a_model_that_does_not_fit_is_named_with_what_to_change(
    role: str, key: str, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OUT[0]

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", full)
    cfg, device = Config(), torch.device("cpu")
    cfg.model.name = folder = str(tiny_model_dir)
    cfg.train_model.lora.rank = 4 if role == "adapters" else 0
    cfg.train_model.autocast, cfg.ref_model.dtype = Autocast("no"), Dtype("float32")
    with pytest.raises(TrainingStopped) as caught:
        if role == "reference":
            load_reference(cfg, folder, device, None, True)
        elif role == "any":
            load_model(folder, cfg.model, device, torch.float32)
        else:
            build_model(cfg, folder, device, None)
    message = str(caught.value)
    assert message.startswith(f"model.name={folder}: memory ran out while it was loaded on cpu in float32: ")
    assert key in message.partition("float32: ")[2]


def test_a_model_that_fits_but_cannot_be_made_ready_is_one_message(
    train: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OUT[2]

    monkeypatch.setattr("torchrl_grpo.training.learner.distribute", full)
    with pytest.raises(TrainingStopped, match=r"made ready for training: .*train_model\.parallelism=fsdp2"):
        train("run")
