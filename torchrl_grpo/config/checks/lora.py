"""Checks of ``train_model.lora``, and of the keys of the reference model beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrl_grpo.config.derived import num_devices
from torchrl_grpo.config.keys import bad_value

if TYPE_CHECKING:
    from torchrl_grpo.config.schema import Config

# Name that selects every linear layer except the output head.
ALL_LINEAR = "all-linear"


def check_lora(cfg: Config) -> None:
    """Check the keys of the adapters against each other and against the keys of the reference model.

    With adapters, the frozen base model doubles as the reference model, which is then neither loaded nor
    placed nor refreshed on its own.

    Raises:
        ConfigError: a value is invalid or would be ignored; the error names the first one found.
    """
    lora, reference, trained = cfg.train_model.lora, cfg.ref_model, cfg.train_model
    key = "train_model.lora.target_modules"
    if not lora.target_modules or not all(name.strip() for name in lora.target_modules):
        raise bad_value(key, lora.target_modules, "it names no layer", f"{key}=[{ALL_LINEAR}]")
    if ALL_LINEAR in lora.target_modules and len(lora.target_modules) > 1:
        wrong = f"{ALL_LINEAR} stands for every linear layer already"
        raise bad_value(key, lora.target_modules, wrong, f"{key}=[{ALL_LINEAR}]")
    if lora.rank == 0:
        return
    why = "with train_model.lora.rank above 0 the reference is the model without its adapter, and"
    if reference.refresh_frequency > 0:
        key = "ref_model.refresh_frequency"
        raise bad_value(key, reference.refresh_frequency, f"{why} that is frozen", f"{key}=0")
    if reference.dtype != "auto":
        key = "lora.base_dtype" if trained.quantization == "none" else "quantization"
        held = lora.base_dtype if trained.quantization == "none" else trained.quantization
        wrong = f"{why} that is held in train_model.{key}={held}"
        raise bad_value("ref_model.dtype", reference.dtype, wrong, "ref_model.dtype=auto")
    wrong = f"{why} that runs where the trainer does"
    ranks = num_devices(trained)
    # Without a list, the planner puts rank 0 on GPU 0, and the others on the next ones.
    own = [[0], [*range(ranks)]] if trained.devices is None else [trained.devices]
    if reference.devices is not None and reference.devices not in own:
        raise bad_value("ref_model.devices", reference.devices, wrong, "ref_model.devices=null")
    if reference.num_devices not in ("auto", 1, ranks):
        raise bad_value("ref_model.num_devices", reference.num_devices, wrong, "ref_model.num_devices=auto")
