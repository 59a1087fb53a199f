"""Resolve what the launcher and the machine decide: training ranks, parallelism, and the default model."""

from __future__ import annotations

from dataclasses import replace

from torchrl_grpo.config import Config
from torchrl_grpo.config.keys import bad_value
from torchrl_grpo.config.values import ZERO_STAGES, Parallelism
from torchrl_grpo.planning import launcher
from torchrl_grpo.runtime import hardware, rank_env

# The models of ``model.name=auto``. All weights of the second train on one GPU of 24 GB.
WITHOUT_GPU, WITH_GPU = "smollm2-135m", "Qwen/Qwen2.5-0.5B-Instruct"
# Value of train_model.parallelism -> its file in config/accelerate.
_FILES = {"ddp": "multi_gpu", "fsdp2": "fsdp2", **{kind: kind for kind in ZERO_STAGES}}


def resolved(cfg: Config) -> Config:
    """Return the configuration with the launcher's number of ranks, parallelism and other settings.

    ``train_model.parallelism=auto`` remains if the launcher has no settings for it, or those of DDP. Then the
    planner decides.

    Raises:
        ConfigError: the configuration contradicts the launcher, or the model cannot be held in this way.
    """
    cfg = launcher.with_settings(cfg)
    kind = parallelism(cfg)
    if not rank_env.launched():
        return cfg
    num_devices, started = cfg.train_model.num_devices, rank_env.world_size()
    if num_devices not in ("auto", started):
        raise bad_value(
            "train_model.num_devices",
            num_devices,
            f"the launcher has started {started} processes",
            f"train_model.num_devices={started}, or --num_processes {num_devices} for the launcher",
        )
    kind = cfg.train_model.parallelism if kind == "ddp" else kind
    train = replace(cfg.train_model, num_devices=rank_env.local_world_size(), parallelism=kind)
    return replace(cfg, train_model=train)


def parallelism(cfg: Config) -> Parallelism:
    """Return how several ranks hold the model.

    This is ``train_model.parallelism``, or the launcher's choice if that is ``auto``.

    Raises:
        ConfigError: the launcher was configured for another parallelism, or the model does not support it.
    """
    configured = cfg.train_model.parallelism
    of_launcher = launcher.parallelism(configured)
    # "ddp" is also what a launcher without settings reports, so it contradicts nothing. A launcher that was
    # configured for FSDP or DeepSpeed must match.
    if configured not in ("auto", of_launcher) and of_launcher != "ddp":
        name = "FSDP" if of_launcher == "fsdp2" else f"DeepSpeed ZeRO-{ZERO_STAGES[of_launcher]}"
        raise bad_value(
            "train_model.parallelism",
            configured,
            f"the launcher was configured for {name}",
            f"train_model.parallelism=auto, or config/accelerate/{_FILES[configured]}.yaml for the launcher",
        )
    kind = of_launcher if configured == "auto" else configured
    if kind in ZERO_STAGES and cfg.train_model.compile:
        wrong = f"this version does not compile layers that are held with {kind}"
        raise bad_value("train_model.compile", True, wrong, "train_model.compile=false")
    if kind == "ddp":
        return kind
    optimizer = cfg.optimizer.name
    if optimizer == "adamw_8bit" or (optimizer == "muon" and kind in ZERO_STAGES):
        wrong = f"it is not available for a model that is held with {kind}"
        fix = "optimizer.name=adamw, or train_model.parallelism="
        raise bad_value("optimizer.name", optimizer, wrong, fix + ("fsdp2" if optimizer == "muon" else "ddp"))
    if cfg.train_model.autocast == "fp16":
        wrong = "the loss scaler would see the overflow of one shard only"
        raise bad_value("train_model.autocast", "fp16", wrong, "train_model.autocast=bf16")
    if cfg.train_model.lora.rank > 0:
        raise bad_value(
            "train_model.parallelism",
            configured,
            "adapters are merged on one rank, which must hold their matrices whole; they need no shards",
            "train_model.parallelism=ddp, or config/accelerate/multi_gpu.yaml for the launcher",
        )
    return kind


def with_model(cfg: Config) -> Config:
    """Return the configuration with the name of a model in place of ``auto``.

    Raises:
        ConfigError: the GPUs of this machine cannot be read, or are too old.
    """
    if cfg.model.name != "auto":
        return cfg
    name = WITH_GPU if hardware.present().gpus else WITHOUT_GPU
    return replace(cfg, model=replace(cfg.model, name=name))
