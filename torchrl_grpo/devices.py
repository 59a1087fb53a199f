"""``num_devices`` and ``devices`` to who runs where. Imports no torch: the planner is pure.

This version runs everything on one device: the GPU where there is one, the CPU otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchrl_grpo.config import Config
from torchrl_grpo.errors import ConfigError


@dataclass(frozen=True)
class Placement:
    """Where each role runs, as torch device names.

    Attributes:
        train: the model that is trained.
        inference: the engine.
        reference: the reference model, used only with ``policy.kl_coef``.
    """

    train: str
    inference: str
    reference: str


def place(cfg: Config, num_gpus: int) -> Placement:
    """Place the three roles on the devices present.

    Args:
        cfg: ``train_model``, ``inference_model`` and ``ref_model`` are read.
        num_gpus: GPUs of this machine; with none, every role runs on the CPU.

    Raises:
        ConfigError: a role asks for several devices, or for a GPU that is not there.
    """
    train = _device("train_model", cfg.train_model.num_devices, cfg.train_model.devices, num_gpus, "cuda:0")
    inference = _device(
        "inference_model", cfg.inference_model.num_devices, cfg.inference_model.devices, num_gpus, train
    )
    if cfg.inference_model.backend == "vllm" and inference not in ("cpu", "cuda:0"):
        raise ConfigError(
            f"inference_model.devices=[{inference.removeprefix('cuda:')}]: vLLM takes the first "
            "GPU it sees; choose it with the environment variable CUDA_VISIBLE_DEVICES, and write "
            "inference_model.devices=[0]"
        )
    return Placement(
        train,
        inference,
        _device("ref_model", cfg.ref_model.num_devices, cfg.ref_model.devices, num_gpus, train),
    )


def _device(role: str, num_devices: int, devices: list[int] | None, num_gpus: int, default: str) -> str:
    if num_devices != 1:
        raise ConfigError(
            f"{role}.num_devices={num_devices}: each role runs on one device in this version; "
            f"write {role}.num_devices=1"
        )
    if num_gpus == 0:
        return "cpu"
    if not devices:
        return default
    index = devices[0]
    if index >= num_gpus:
        raise ConfigError(
            f"{role}.devices=[{index}]: this machine has {num_gpus} GPU(s), numbered from 0; "
            f"write {role}.devices=[{num_gpus - 1}] or null"
        )
    return f"cuda:{index}"
