"""Whole runs on pretended GPUs: placements of the roles, number formats, features, and planted faults."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from pretended_cuda import DeviceMismatch, PretendedCuda
from tiny_runs import config  # noqa: F401  a fixture
from torch import Tensor

from torchrl_grpo.config import Config
from torchrl_grpo.config.values import Autocast, Dtype
from torchrl_grpo.inference import transformers_engine
from torchrl_grpo.inference.transformers_engine import TransformersEngine
from torchrl_grpo.models.scoring import fused_head
from torchrl_grpo.models.scoring.head import score_tokens
from torchrl_grpo.observe import report
from torchrl_grpo.tools.verify_resume import read, unmeasured
from torchrl_grpo.training.job import run

pytestmark = pytest.mark.slow

KL = {"policy.kl_coef": 0.1}
FLOAT32 = {"train_model.autocast": "no", "inference_model.dtype": "float32", "ref_model.dtype": "float32"}
FLOAT16 = {"train_model.autocast": "fp16", "inference_model.dtype": "float16"}


@dataclass
class Case:
    """A configuration and its machine, all of whose GPUs it must use.

    Attributes:
        changes: values by key.
        gpus: engine and reference get one of their own where there are enough.
        capability: of each GPU.
        autocast: the format that the trainer must compute in; None is float32.
    """

    changes: dict[str, Any] = field(default_factory=dict)
    gpus: int = 1
    capability: tuple[int, int] = (9, 0)
    autocast: torch.dtype | None = torch.bfloat16


CASES = {
    "float32": Case(FLOAT32, autocast=None),
    "float16": Case(FLOAT16, autocast=torch.float16),
    "a GPU without bfloat16": Case(KL, capability=(7, 5), autocast=None),
    "a reference on the trainer's GPU": Case(KL),
    "two references": Case({**KL, "ref_model.num_devices": 2}, gpus=4),
    "a reference that follows": Case(
        {**KL, "ref_model.refresh_frequency": 1, "ref_model.refresh_mix": 0.5}, gpus=3
    ),
    "a proximal policy of the trainer's": Case(
        {"policy.proximal": "trainer", "policy.correction": "truncate", "train.optim_batch_size": 2}
    ),
    "adapters": Case({**KL, "train_model.lora.rank": 4, "checkpoint.export_merged": True}, gpus=2),
    "gradient checkpointing and a fused head": Case(
        {"train_model.gradient_checkpointing": True, "train_model.fused_head": True}
    ),
    "prompts run once per response, and an engine that sleeps": Case(
        {"train_model.shared_prefix": False, "inference_model.sleep": True}
    ),
    "a bonus for entropy, micro-batches, and pass@k": Case(
        {
            "policy.entropy_coef": 0.01,
            "policy.entropy_target": 3.0,
            "train.gradient_accumulation_steps": 2,
            "eval.pass_at_k": 2,
        }
    ),
    "MaxEnt": Case({**KL, "policy.advantage_estimator": "maxent", "policy.kl_in": "weights"}, gpus=3),
    "a penalty in the reward, and attention with masks": Case(
        {**KL, "policy.kl_in": "reward", "train_model.prefix_attention": "dense"}, gpus=3
    ),
}


@pytest.fixture
def small(config: Config, monkeypatch: pytest.MonkeyPatch) -> Config:
    """One round of two groups of two, evaluated before and after, and saved; number formats as on a GPU."""
    config.env.num_envs = config.env.repeats = 2
    config.train.total_dialog_turns = 4
    config.train.checkpoint_frequency = 1
    config.inference_model.max_new_tokens = 3
    config.eval.num_problems = 2
    config.train_model.autocast = Autocast.auto
    config.inference_model.dtype = config.ref_model.dtype = Dtype.auto
    # Half of the time of a run as small as this, and nothing of a GPU's.
    monkeypatch.setattr(report, "plot", lambda run_dir, grader: None)
    return config


def change(cfg: Config, changes: dict[str, Any]) -> None:
    for key, value in changes.items():
        *groups, leaf = key.split(".")
        section: Any = cfg
        for group in groups:
            section = getattr(section, group)
        setattr(section, leaf, value)


@pytest.mark.parametrize("name", CASES)
def test_a_whole_run(
    name: str,
    small: Config,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = CASES[name]
    change(small, case.changes)
    # Liger is installed in every case, with a kernel that is the head in blocks.
    monkeypatch.setattr(fused_head, "supports", lambda *_: True)
    monkeypatch.setattr(
        fused_head,
        "score_tokens",
        lambda hidden, targets, weight, options: score_tokens(hidden, targets, weight, None, options),
    )
    with PretendedCuda(case.gpus, case.capability) as machine:
        summary = run(small, tmp_path / "run")
    lines = read(tmp_path / "run/metrics.jsonl")
    used = "dense" if case.autocast is None or small.train_model.prefix_attention == "dense" else "varlen"
    error = capsys.readouterr().err
    assert (f"attention over shared prompts: {used}" in error) == small.train_model.shared_prefix
    assert f"output head: {'fused' if 'train_model.fused_head' in case.changes else 'in blocks'}" in error
    if name == "adapters":
        assert lines[1]["loss/kl"] == 0, "before the first step the base and the adapters compute the same"
    assert summary["steps"] == lines[-1]["step"] > 0
    assert all("eval/accuracy" in line for line in (lines[0], lines[-1]))
    assert (tmp_path / f"run/checkpoints/{summary['steps']}").is_dir()
    assert machine.allocated == {torch.device("cuda", gpu) for gpu in range(case.gpus)}
    assert machine.autocasts == ({case.autocast} if case.autocast else set())
    assert summary["peak_cuda_memory_gib"] == case.gpus


def test_a_resumed_run(small: Config, tmp_path: Path) -> None:
    small.train.total_dialog_turns = 8
    small.checkpoint.keep = 2
    change(small, KL)
    with PretendedCuda(gpus=3):
        run(small, tmp_path / "run")
    whole = [unmeasured(line) for line in read(tmp_path / "run/metrics.jsonl")]
    small.resume = str(tmp_path / "run/checkpoints/1")
    with PretendedCuda(gpus=3):
        run(small, tmp_path / "run")
    assert [unmeasured(line) for line in read(tmp_path / "run/metrics.jsonl")] == whole
    assert whole[-1]["step"] == 2


def take_over(engine: TransformersEngine, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Loads weights without moving them to the engine's device."""
    engine.wake()
    own = dict(engine.model.named_parameters())
    for name, tensor in weights:
        own[name].data = tensor.detach()


def sample_there(log_p: Tensor, noise: Any) -> Tensor:
    """Samples on the GPU with a generator for the CPU."""
    drawn = torch.empty_like(log_p).exponential_(generator=torch.Generator().manual_seed(0))
    return (log_p - drawn.log()).argmax(-1)


def sample_here(log_p: Tensor, noise: Any) -> Tensor:
    """Draws noise on the CPU and leaves it there."""
    return (log_p - torch.empty(log_p.shape).exponential_().log()).argmax(-1)


FAULTS: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "weights published without a move": (TransformersEngine, "load_weights", take_over, "cuda:0.*cuda:1"),
    "a generator for the CPU": (
        transformers_engine,
        "_sample",
        sample_there,
        "generator for cpu used on cuda:1",
    ),
    "noise left on the CPU": (transformers_engine, "_sample", sample_here, "cuda:1, cpu"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_run_is_found(
    fault: str, small: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, faulty, message = FAULTS[fault]
    monkeypatch.setattr(owner, name, faulty)
    with pytest.raises(DeviceMismatch, match=message), PretendedCuda(gpus=2):
        run(small, tmp_path / "run")


# Files of the project in which tensors are moved, and what is found where a move is forgotten.
MOVES = {
    "transformers_engine.py": "cuda:1, cpu",
    "transfer.py": "cuda:[02], cpu",
}


@pytest.mark.parametrize("file", MOVES)
def test_a_forgotten_move_in_a_run_is_found(file: str, small: Config, tmp_path: Path) -> None:
    change(small, KL)
    with pytest.raises(DeviceMismatch, match=MOVES[file]), PretendedCuda(gpus=3) as machine:
        machine.forgetful = {file}
        run(small, tmp_path / "run")
