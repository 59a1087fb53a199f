"""``num_devices`` and ``devices`` to who runs where. Imports no torch: the planner is pure.

This version trains on one device: the GPU where there is one, the CPU otherwise. Engines of grpo.py run there
too; workers of grpo-async.py have a GPU each, beside the trainer's where there are enough.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchrl_grpo.config import Config
from torchrl_grpo.config_keys import bad_value
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


def place(cfg: Config, num_gpus: int, apart: bool = False, rank: int = 0) -> Placement:
    """Place the three roles on the devices present.

    Args:
        cfg: ``train_model``, ``inference_model`` and ``ref_model`` are read.
        num_gpus: GPUs of this machine; with none, every role runs on the CPU.
        apart: engines are workers in processes of their own, each of which sees its own GPU as the first:
            see :func:`worker_gpus`.
        rank: of the training process that asks, on this machine.

    Raises:
        ConfigError: a role asks for several devices, or for a GPU that is not there.
    """
    count, chosen = cfg.train_model.num_devices, cfg.train_model.devices
    if num_gpus and count > num_gpus:
        raise bad_value(
            "train_model.num_devices",
            count,
            f"this machine has {num_gpus} GPUs",
            f"train_model.num_devices={num_gpus}",
        )
    train = _device("train_model", count, chosen, num_gpus, f"cuda:{rank}", rank)
    inference = "cuda:0" if num_gpus else "cpu"
    if not apart:
        inference = _device("inference_model", 1, cfg.inference_model.devices, num_gpus, train)
    if not apart and cfg.inference_model.backend == "vllm" and inference not in ("cpu", "cuda:0"):
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


def worker_gpus(cfg: Config, num_gpus: int) -> list[int]:
    """GPUs of this machine for the workers of grpo-async.py, which get one each; none without a GPU.

    Args:
        cfg: ``inference_model`` is read.
        num_gpus: GPUs of this machine; one of them is the trainer's.

    Raises:
        ConfigError: there are too few, or not those asked for.
    """
    count, devices = cfg.inference_model.num_devices, cfg.inference_model.devices
    if num_gpus == 0:
        return []
    trainer = (cfg.train_model.devices or [0])[0]
    others = [gpu for gpu in range(num_gpus) if gpu != trainer]
    if devices is not None:
        wanted = set(devices)
        shared = trainer in wanted and num_gpus > 1
        if len(devices) != count or len(wanted) != count or max(devices) >= num_gpus or shared:
            raise bad_value(
                "inference_model.devices",
                devices,
                f"must be {count} (inference_model.num_devices) different GPUs of this machine's {num_gpus}, "
                "without the trainer's",
                f"inference_model.devices={others[-count:]}",
            )
        return devices
    if len(others) >= count:
        return others[:count]
    if num_gpus == count == 1:
        # Together with the trainer, which leaves it inference_model.gpu_memory_utilization of the memory.
        return [0]
    raise bad_value(
        "inference_model.num_devices",
        count,
        f"each worker needs a GPU beside the trainer's, and this machine has {num_gpus}",
        f"inference_model.num_devices={max(1, num_gpus - 1)}",
    )


def _device(
    role: str, num_devices: int, devices: list[int] | None, num_gpus: int, default: str, rank: int = 0
) -> str:
    if num_devices != 1 and role != "train_model":
        raise ConfigError(
            f"{role}.num_devices={num_devices}: each role runs on one device in this version; "
            f"write {role}.num_devices=1"
        )
    if num_gpus == 0:
        return "cpu"
    if not devices:
        return default
    index = devices[rank]
    if index >= num_gpus:
        raise ConfigError(
            f"{role}.devices=[{index}]: this machine has {num_gpus} GPU(s), numbered from 0; "
            f"write {role}.devices=[{num_gpus - 1}] or null"
        )
    return f"cuda:{index}"
