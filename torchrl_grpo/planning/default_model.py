"""The model of ``model.name=auto``, which depends on whether the machine has a GPU."""

from __future__ import annotations

from dataclasses import replace

from torchrl_grpo.config import Config
from torchrl_grpo.runtime import hardware

WITHOUT_GPU = "smollm2-135m"
# All of its weights train on one GPU of 24 GB.
WITH_GPU = "Qwen/Qwen2.5-0.5B-Instruct"


def with_model(cfg: Config) -> Config:
    """Return the configuration with the name of a model in place of ``auto``.

    Raises:
        ConfigError: the GPUs of this machine cannot be read, or are too old.
    """
    if cfg.model.name != "auto":
        return cfg
    name = WITH_GPU if hardware.present().gpus else WITHOUT_GPU
    return replace(cfg, model=replace(cfg.model, name=name))
