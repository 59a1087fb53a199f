"""Checks of ``train_model.lora``, and of the keys whose meaning depends on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrl_grpo.config.keys import bad_value, show

if TYPE_CHECKING:
    from torchrl_grpo.config.schema import Config

# Name that selects every linear layer except the output head.
ALL_LINEAR = "all-linear"


def check_lora(cfg: Config) -> None:
    """Check the keys of the adapters against each other and against the keys of the reference model.

    Raises:
        ConfigError: a value is invalid or would be ignored; the error names the first one found.
    """
    lora = cfg.train_model.lora
    key = "train_model.lora.target_modules"
    if not lora.target_modules or not all(name.strip() for name in lora.target_modules):
        raise bad_value(key, lora.target_modules, "names no layer", f"{key}=[{ALL_LINEAR}]")
    if ALL_LINEAR in lora.target_modules and len(lora.target_modules) > 1:
        wrong = f"{ALL_LINEAR} stands for every linear layer already"
        raise bad_value(key, lora.target_modules, wrong, f"{key}=[{ALL_LINEAR}]")
    if lora.rank > 0:
        _check_reference(cfg)
        return
    quantization = cfg.train_model.quantization
    if quantization != "none":
        wrong = "only a frozen model can be quantized, and with train_model.lora.rank=0 all of it is trained"
        good = f"train_model.lora.rank=16 train_model.quantization={quantization}"
        raise bad_value("train_model.quantization", quantization, wrong, good)
    if cfg.checkpoint.export_merged:
        wrong = "without an adapter (train_model.lora.rank=0) checkpoints/<step>/model is the whole model"
        raise bad_value("checkpoint.export_merged", True, wrong, "checkpoint.export_merged=false")
    default = type(lora)()
    for name, value in vars(lora).items():
        if value != vars(default)[name]:
            wrong = "is only read with a train_model.lora.rank above 0"
            usual = show(vars(default)[name])
            good = f"train_model.lora.rank=16 and the same, or train_model.lora.{name}={usual}"
            raise bad_value(f"train_model.lora.{name}", value, wrong, good)


def _check_reference(cfg: Config) -> None:
    """Check ``ref_model`` with adapters, where the frozen base model doubles as the reference model.

    The reference model is then neither loaded nor placed nor refreshed on its own.
    """
    reference, why = (
        cfg.ref_model,
        "with train_model.lora.rank above 0 the reference is the model without its adapter",
    )
    if reference.refresh_frequency > 0:
        key, wrong = "ref_model.refresh_frequency", f"{why}, and that is frozen"
        raise bad_value(key, reference.refresh_frequency, wrong, f"{key}=0")
    if reference.dtype != "auto":
        wrong = f"{why}, and is held in train_model.lora.base_dtype={cfg.train_model.lora.base_dtype}"
        raise bad_value("ref_model.dtype", reference.dtype, wrong, "ref_model.dtype=auto")
    if reference.devices is not None and reference.devices != (cfg.train_model.devices or [0]):
        wrong = f"{why}, and runs where the trainer does"
        raise bad_value("ref_model.devices", reference.devices, wrong, "ref_model.devices=null")
    trained = cfg.train_model
    ranks = 1 if trained.devices is None else len(trained.devices)
    ranks = ranks if trained.num_devices == "auto" else int(trained.num_devices)
    if reference.num_devices not in ("auto", 1, ranks):
        wrong = f"{why}, and runs where the trainer does"
        raise bad_value("ref_model.num_devices", reference.num_devices, wrong, "ref_model.num_devices=auto")
